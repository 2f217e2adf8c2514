"""Reads .bin files of PyTorch (1.6 and later) without PyTorch, by memory map and without running anything that they name.

Format: a zip archive, stored uncompressed, of a pickle NAME/data.pkl and the values of each storage in NAME/data/KEY. The pickle is a
dict of tensors, each a view of a storage: an offset, a shape and strides.
"""

import collections
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.loaders import checkpoint
from jaxllm.loaders.checkpoint import DTYPES, TensorEntry, span_bytes

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip member: the lengths of its name and of its extra field, which the data follows."""


@dataclass(frozen=True)
class _StorageType:
    dtype: str
    itemsize: int


@dataclass(frozen=True)
class _Storage:
    type: _StorageType
    key: str


@dataclass(frozen=True)
class _Tensor:
    """A view of a storage; offset and strides count values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Checkpoint(checkpoint.Checkpoint):
    """Files of PyTorch."""

    INDEX = "pytorch_model.bin.index.json"
    PATTERNS: ClassVar[tuple[str, ...]] = ("pytorch_model*.bin",)

    def read_entries(self, file: Path) -> dict[str, TensorEntry]:
        if not zipfile.is_zipfile(file):
            raise ModelLoadError(
                f"{file} is no zip archive: it is truncated, or written by a PyTorch before 1.6; download it again, or read it with "
                "torch.load(..., weights_only=True) and save it with safetensors"
            )
        try:
            with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
                return _entries(file, archive, stream)
        except ModelLoadError:
            raise
        except Exception as error:  # what a broken pickle or archive raises is of any type
            raise ModelLoadError(f"{file} is corrupt: {error!r}; download or copy it again") from error


def _entries(file: Path, archive: zipfile.ZipFile, stream: BinaryIO) -> dict[str, TensorEntry]:
    members = {info.filename: info for info in archive.infolist()}
    pickled = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise ModelLoadError(f"{file} holds {len(pickled)} files data.pkl, must hold one; it is not a checkpoint of PyTorch")
    folder = pickled[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in members and archive.read(f"{folder}byteorder") != b"little":
        raise ModelLoadError(f"{file} holds big-endian numbers; convert it to safetensors")
    with archive.open(pickled[0]) as data:
        found = _WeightsOnly(data, file).load()
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds a {type(found).__name__}, must hold weights by name")
    starts: dict[str, int] = {}
    entries = {}
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise ModelLoadError(f"{file} holds {name!r} of type {type(tensor).__name__}, must hold tensors alone, by name")
        member = f"{folder}data/{tensor.storage.key}"
        if member not in starts:
            starts[member] = _start_of_data(stream, members[member])
        entries[name] = _entry(file, name, tensor, starts[member], members[member].file_size)
    return entries


def _start_of_data(stream: BinaryIO, info: zipfile.ZipInfo) -> int:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    stream.seek(info.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length


def _entry(file: Path, name: str, tensor: _Tensor, start: int, num_bytes: int) -> TensorEntry:
    """start, num_bytes: of the storage."""
    itemsize = tensor.storage.type.itemsize
    strides = tuple(stride * itemsize for stride in tensor.strides)
    if min((tensor.offset, *tensor.shape, *strides)) < 0:
        raise ValueError(f"{name} has negative sizes")
    offset = tensor.offset * itemsize
    length = span_bytes(np.dtype(f"V{itemsize}"), tensor.shape, strides)
    if offset + length > num_bytes:
        raise ValueError(f"{name} ends at byte {offset + length} of its storage, which has {num_bytes}")
    return TensorEntry(file, tensor.storage.type.dtype, tensor.shape, start + offset, length, strides)


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


_STORAGES = {
    "BFloat16": "BF16",
    "Half": "F16",
    "Float": "F32",
    "Double": "F64",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}
"""PyTorch's types of storages by safetensors' names."""
_SIZES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, **{code: dtype.itemsize for code, dtype in DTYPES.items()}}
_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", f"{name}Storage"): _StorageType(code, _SIZES[code]) for name, code in _STORAGES.items()},
}
"""What a file may name, and what stands for it here: nothing of PyTorch, and nothing else, is ever called."""


class _WeightsOnly(pickle.Unpickler):
    """Unpickles tensors, as descriptions without their values."""

    def __init__(self, stream: Any, file: Path):
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ModelLoadError(
                f"{self._file} names {module}.{name}, which weights do not need and which is not run; use a checkpoint in safetensors"
            )
        return _ALLOWED[module, name]

    def persistent_load(self, saved_id: Any) -> _Storage:
        kind, storage_type, key, *_ = saved_id
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not isinstance(key, str):
            raise ValueError(f"{saved_id!r} is no storage")
        return _Storage(storage_type, key)
