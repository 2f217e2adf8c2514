"""Reads safetensors files by memory map: opening costs a header, a tensor costs the pages that are touched.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import itertools
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from jaxllm.errors import ModelLoadError
from jaxllm.files import open_regular
from jaxllm.loaders import checkpoint
from jaxllm.loaders.checkpoint import MAX_DIMS, MAX_NAME, MAX_TENSORS, NUMPY_TYPES, TensorEntry

MAX_HEADER_BYTES = 16 * 2**20
"""In a file: 120 000 tensors. All 92 000 of DeepSeek-V3 would need 12 MB in one file; its parts have less than 0.2 MB."""
_MAX_COLONS = MAX_HEADER_BYTES // 32
"""In a header: four of a tensor, which takes some 130 bytes. Many small members would take much memory."""
_MAX_ENTRY_BYTES = 4096

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _HeaderEntry(msgspec.Struct):
    """A tensor as a header has it; offsets count from the end of the header."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_decode_header = msgspec.json.Decoder(dict[Annotated[str, msgspec.Meta(max_length=MAX_NAME)], msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_HeaderEntry).decode


class Checkpoint(checkpoint.Checkpoint):
    """Safetensors files."""

    INDEX = "model.safetensors.index.json"
    # Some repositories hold the same weights a second time, under names of their own, for another program.
    PATTERNS: ClassVar[tuple[str, ...]] = ("model*.safetensors", "*.safetensors")

    def read_entries(self, file: Path) -> dict[str, TensorEntry]:
        return read_header(file, self.max_tensors)


def read_header(file: Path, max_tensors: int = MAX_TENSORS) -> dict[str, TensorEntry]:
    """The tensors of a file by name.

    Raises ModelLoadError if the file is truncated or its header makes no sense: too long, names or shapes beyond MAX_NAME and
    MAX_DIMS, tensors that do not fit their bytes or share some. Raises OSError if it is no regular file.
    """

    def corrupt(reason: str) -> ModelLoadError:
        return ModelLoadError(f"{file} is truncated or corrupt: {reason}; download or copy it again")

    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise corrupt(f"it has {size} bytes, a safetensors file has at least 8")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise corrupt(f"its header should have {length} bytes, {size - 8} follow")
        if length > MAX_HEADER_BYTES:
            raise ModelLoadError(
                f"{file} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are read; save the tensors in several files"
            )
        header = stream.read(length)
    entries: dict[str, TensorEntry] = {}
    try:
        for name, tensor in _members(header):
            start, end = tensor.data_offsets
            if not _fits(tensor):
                raise ValueError(f"the header entry of {name} is {tensor}")
            if 8 + length + end > size:
                raise ValueError(f"{name} ends at byte {8 + length + end}, the file at {size}")
            if len(entries) == max_tensors:
                raise ModelLoadError(f"{file} has more than {max_tensors} tensors, the limit; it is not of this model")
            entries[name] = TensorEntry(file, tensor.dtype, tensor.shape, 8 + length + start, end - start)
    except (ValueError, RecursionError) as error:
        raise corrupt(str(error)) from error
    if pair := _sharing(entries):
        raise corrupt(f"{pair[0]} and {pair[1]} share bytes")
    return entries


def _members(header: bytes) -> Iterator[tuple[str, _HeaderEntry]]:
    """The tensors of a header, decoded one after the other: one call for all would keep other threads from running. Raises ValueError."""
    if (num_colons := header.count(b":")) > _MAX_COLONS:
        raise ValueError(f"its header has {num_colons} colons, at most {_MAX_COLONS} make sense")
    try:
        members = _decode_header(header.rstrip(b" \0"))
    except ValueError as error:
        raise ValueError(f"its header is not a JSON object of tensors: {error}") from None
    for name, value in members.items():
        if name == "__metadata__":
            continue
        try:
            if len(value) > _MAX_ENTRY_BYTES:
                raise ValueError(f"it has {len(value)} bytes, at most {_MAX_ENTRY_BYTES} make sense")
            yield name, _decode_entry(value)
        except ValueError as error:
            raise ValueError(f"the header entry of {name} is {bytes(value)[:200].decode(errors='replace')}: {error}") from None


def _fits(tensor: _HeaderEntry) -> bool:
    """Whether a tensor has the bytes that its type and shape need. Those of types that we do not know are kept, as they may be unused:
    their values have a bit at least."""
    num_values, num_bytes = math.prod(tensor.shape), tensor.data_offsets[1] - tensor.data_offsets[0]
    if tensor.dtype in NUMPY_TYPES:
        return num_bytes == num_values * NUMPY_TYPES[tensor.dtype].itemsize
    return 0 <= num_values <= 8 * num_bytes


def _sharing(entries: Mapping[str, TensorEntry]) -> tuple[str, str] | None:
    """Two tensors that share bytes, which no writer makes."""
    placed = sorted((entry.start, entry.start + entry.num_bytes, name) for name, entry in entries.items() if entry.num_bytes)
    return next(((name, after) for (_, end, name), (start, _, after) in itertools.pairwise(placed) if end > start), None)
