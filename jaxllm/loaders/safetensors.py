"""Reads safetensors files by memory map: opening costs a header, a tensor costs the pages that are touched.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.loaders import checkpoint
from jaxllm.loaders.checkpoint import NUMPY_TYPES, TensorEntry

_LONGEST_HEADER = 100 * 2**20

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    """A tensor as a header has it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


class Checkpoint(checkpoint.Checkpoint):
    """Safetensors files."""

    INDEX = "model.safetensors.index.json"
    # Some repositories hold the same weights a second time, under names of their own, for another program.
    PATTERNS: ClassVar[tuple[str, ...]] = ("model*.safetensors", "*.safetensors")

    def read_entries(self, file: Path) -> dict[str, TensorEntry]:
        return read_header(file)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name. Raises ModelLoadError if the file is truncated or its header makes no sense."""

    def corrupt(reason: str) -> ModelLoadError:
        return ModelLoadError(f"{file} is truncated or corrupt: {reason}; download or copy it again")

    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise corrupt(f"it has {size} bytes, a safetensors file has at least 8")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_LONGEST_HEADER, size - 8):
            raise corrupt(f"its header should have {length} bytes, {size - 8} follow")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise corrupt(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise corrupt("its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {}
    for name, fields in header.items():
        entry = _entry(file, fields, data_start=8 + length)
        if entry is None:
            raise corrupt(f"the header entry of {name} is {fields}")
        if entry.start + entry.num_bytes > size:
            raise corrupt(f"{name} ends at byte {entry.start + entry.num_bytes}, the file at {size}")
        entries[name] = entry
    return entries


def _entry(file: Path, fields: Any, data_start: int) -> TensorEntry | None:
    """None if the fields are not those of a tensor. Tensors of types that we do not know are kept: they may be unused."""
    try:
        tensor = msgspec.convert(fields, _HeaderEntry)
    except msgspec.ValidationError:
        return None
    dtype, shape, (start, end) = tensor.dtype, tensor.shape, tensor.data_offsets
    if start > end or (dtype in NUMPY_TYPES and end - start != math.prod(shape) * NUMPY_TYPES[dtype].itemsize):
        return None
    return TensorEntry(file, dtype, shape, data_start + start, end - start)


def write(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file. Arrays must be of a type in DTYPES, or bytes."""
    codes = {dtype: code for code, dtype in NUMPY_TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        end = position + array.nbytes
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())
