"""Reads .bin files of PyTorch (1.6 and later) without PyTorch, by memory map and without running anything that they name.

Format: a zip archive, stored uncompressed, of a pickle NAME/data.pkl and the values of each storage in NAME/data/KEY. The pickle is a
dict of tensors, each a view of a storage: an offset, a shape and strides.
"""

import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from jaxllm.errors import ModelLoadError
from jaxllm.files import open_regular
from jaxllm.loaders import checkpoint, torch_pickle
from jaxllm.loaders.checkpoint import NUMPY_TYPES, TensorEntry, span_bytes

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of a zip member's name and of its extra field, which the data follows."""
_CODES = {dtype: code for code, dtype in NUMPY_TYPES.items()}
"""Safetensors' names of types."""
_MAX_LISTING_BYTES = 8 * 2**20
"""Size of the list of an archive's members: a tensor takes some 100."""


class Checkpoint(checkpoint.Checkpoint):
    """Files of PyTorch."""

    INDEX = "pytorch_model.bin.index.json"
    PATTERNS: ClassVar[tuple[str, ...]] = ("pytorch_model*.bin",)

    def read_entries(self, file: Path) -> dict[str, TensorEntry]:
        try:
            with open_regular(file) as stream:
                return _entries(file, stream, self.max_tensors)
        except torch_pickle.NotNeededError as error:
            raise ModelLoadError(
                f"{file} names {error}, which weights do not need and which is not run; use a checkpoint in safetensors"
            ) from error
        except ModelLoadError:
            raise
        except Exception as error:  # what a broken archive raises is of any type
            raise ModelLoadError(f"{file} is corrupt: {str(error) or repr(error):.300}; download or copy it again") from error


class _Listing:
    """A file for the reader of archives, which asks for the whole list of members at once, however long it says to be."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        """Read at most _MAX_LISTING_BYTES. Raises ValueError if more are requested."""
        if size > _MAX_LISTING_BYTES:
            raise ValueError(f"the list of its members has {size} bytes, at most {_MAX_LISTING_BYTES} are read")
        return self._stream.read(size if size >= 0 else _MAX_LISTING_BYTES)


def _entries(file: Path, stream: BinaryIO, max_tensors: int) -> dict[str, TensorEntry]:
    listing: Any = _Listing(stream)
    if not zipfile.is_zipfile(listing):
        raise ModelLoadError(
            f"{file} is no zip archive: it is truncated, or written by a PyTorch before 1.6; download it again, or read it with "
            "torch.load(..., weights_only=True) and save it with safetensors"
        )
    with zipfile.ZipFile(listing) as archive:
        members = {info.filename: info for info in archive.infolist()}
    pickled = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise ModelLoadError(f"{file} holds {len(pickled)} files data.pkl, must hold one; it is not a checkpoint of PyTorch")
    folder = pickled[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in members and _content(stream, members[f"{folder}byteorder"], 16) != b"little":
        raise ModelLoadError(f"{file} holds big-endian numbers; convert it to safetensors")
    max_operations = min(torch_pickle.MAX_OPERATIONS, max_tensors * torch_pickle.OPERATIONS_PER_TENSOR)
    found = torch_pickle.unpickle(_content(stream, members[pickled[0]], torch_pickle.MAX_BYTES), max_operations)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds a {type(found).__name__}, must hold weights by name")
    starts: dict[str, int] = {}
    entries = {}
    for name, tensor in found.items():
        if not isinstance(tensor, torch_pickle.Tensor):
            raise ModelLoadError(f"{file} holds {name!r} of type {type(tensor).__name__}, must hold tensors alone, by name")
        member = f"{folder}data/{tensor.storage.key}"
        if member not in members:
            raise ModelLoadError(f"{file} is corrupt: it lacks {member}, the values of {name}; download or copy it again")
        if member not in starts:
            starts[member] = _start_of_data(stream, members[member])
        entries[name] = _entry(file, name, tensor, starts[member], members[member].file_size)
    return entries


def _content(stream: BinaryIO, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
    if info.file_size > max_bytes:
        raise ValueError(f"{info.filename} has {info.file_size} bytes, at most {max_bytes} are read")
    stream.seek(_start_of_data(stream, info))
    return stream.read(info.file_size)


def _start_of_data(stream: BinaryIO, info: zipfile.ZipInfo) -> int:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    stream.seek(info.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length


def _entry(file: Path, name: str, tensor: torch_pickle.Tensor, start: int, num_bytes: int) -> TensorEntry:
    """start, num_bytes: of the storage."""
    dtype = tensor.storage.dtype
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    if min((tensor.offset, *tensor.shape, *strides)) < 0:
        raise ValueError(f"{name} has negative sizes")
    offset, length = tensor.offset * dtype.itemsize, span_bytes(dtype, tensor.shape, strides)
    if offset + length > num_bytes:
        raise ValueError(f"{name} ends at byte {offset + length} of its storage, which has {num_bytes}")
    return TensorEntry(file, _CODES.get(dtype, dtype.name), tensor.shape, start + offset, length, strides)
