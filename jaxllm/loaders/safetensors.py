"""Reads safetensors files by memory map: opening costs a header, a tensor costs the pages that are touched.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.errors import ModelLoadError

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_LONGEST_HEADER = 100 * 2**20
_LFS_POINTER = b"version "
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte of the file where the data begins."""
    num_bytes: int


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    """A tensor as a header has it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


class Checkpoint:
    """All tensors of the safetensors files in a directory. Each header is checked against its file's length at once."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.entries: dict[str, TensorEntry] = {}
        for file in checkpoint_files(directory):
            for name, entry in read_header(file).items():
                if name in self.entries:
                    raise ModelLoadError(f"{name} is both in {self.entries[name].file} and in {file}; remove one of them")
                self.entries[name] = entry
        self._maps: dict[Path, np.memmap] = {}

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of the file. Nothing is read until the view is used."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, dtype=np.uint8, mode="r")
        data = self._maps[entry.file][entry.start : entry.start + entry.num_bytes]
        return np.asarray(data).view(DTYPES[entry.dtype]).reshape(entry.shape)


def checkpoint_files(directory: Path) -> list[Path]:
    """The files with the weights: those of the index, or every model*.safetensors. Raises ModelLoadError if any is missing."""
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not an index of safetensors files: {error!r}") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{directory} lacks {len(missing)} of the {len(names)} files in {_INDEX}: {', '.join(missing)}"
            )
        return [directory / name for name in names]
    # Some repositories hold the same weights a second time, under names of their own, for another program.
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if files:
        return files
    others = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in directory.glob(pattern)]
    found = f"; it has {', '.join(others)}: convert to safetensors first" if others else ""
    raise ModelLoadError(f"{directory} has no weights: no *.safetensors file in it{found}")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name. Raises ModelLoadError if the file is truncated or its header makes no sense."""

    def corrupt(reason: str) -> ModelLoadError:
        return ModelLoadError(f"{file} is truncated or corrupt: {reason}; download or copy it again")

    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise corrupt(f"it has {size} bytes, a safetensors file has at least 8")
        if prefix == _LFS_POINTER:
            raise ModelLoadError(f"{file} is not the weights but a Git LFS pointer to them; run `git lfs pull` or download it")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_LONGEST_HEADER, size - 8):
            raise corrupt(f"its header should have {length} bytes, {size - 8} follow")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
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
    if start > end or (dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize):
        return None
    return TensorEntry(file, dtype, shape, data_start + start, end - start)


def write(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file. Arrays must be of a type in DTYPES."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
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
