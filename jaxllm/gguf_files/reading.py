"""Opens GGUF files: metadata by name, and where each tensor is.

Source: ggml's docs/gguf.md. The package gguf can read them too, but takes 20 times as long for the tokens of a vocabulary.
"""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ModelLoadError

_NUMBERS = {code: np.dtype(kind) for code, kind in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))}
_NUMBERS |= {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
"""Types of values by their codes."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    file: Path
    type: str
    """ggml's name of its number format."""
    shape: tuple[int, ...]
    """Row-major, as everywhere else; a file has it the other way round."""
    start: int
    """Byte of the file where the data begins."""
    num_bytes: int


class GgufFile:
    """A file that was opened, or several that are parts of one, of which the first has the metadata.

    Raises ModelLoadError if one is no such file, or without the package gguf.
    """

    def __init__(self, parts: Sequence[Path]):
        self.file = parts[0]
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise ModelLoadError(
                f"{self.file} is a GGUF file, for which the package gguf is missing: pip install gguf"
            ) from error
        self.metadata: Mapping[str, Any] = {}
        """Its values by name; arrays are lists."""
        self.tensors: dict[str, StoredTensor] = {}
        for part in parts:
            try:
                metadata, tensors = _read(part)
            except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error) as error:
                raise ModelLoadError(
                    f"{part} is not a GGUF file, truncated or corrupt ({type(error).__name__}: {error}); download or copy it again"
                ) from error
            self.metadata = self.metadata or metadata
            self.tensors |= tensors

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return str(self.metadata.get("general.architecture"))

    def value(self, name: str) -> Any:
        """A value of the architecture; None if it is absent."""
        return self.metadata.get(f"{self.architecture}.{name}")


def _read(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.at = 4
        version, num_tensors, num_values = cursor.take("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"its version is {version:#x}, supported: 2 and 3, with the lower byte first")
        metadata = {cursor.string(): cursor.value(*cursor.take("<I")) for _ in range(num_values)}
        found = []
        for _ in range(num_tensors):
            name, (num_dimensions,) = cursor.string(), cursor.take("<I")
            shape = cursor.take(f"<{num_dimensions}Q")[::-1]
            found.append((name, shape, *cursor.take("<IQ")))
        alignment = metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        tensors = {name: _stored(file, shape, code, start + offset) for name, shape, code, offset in found}
        end = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > len(data):
            raise ValueError(f"it has {len(data)} bytes, its tensors end at {end}")
    return metadata, tensors


def _stored(file: Path, shape: tuple[int, ...], code: int, start: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(code)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape, dtype=object))
    return StoredTensor(file, kind.name, shape, start, count // block_values * block_bytes)


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return values

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.at)
        start = self.at + 8
        self.at = start + length
        if self.at > len(self.data):
            raise ValueError(f"a text ends at byte {self.at} of {len(self.data)}")
        return self.data[start : self.at].decode()

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            element, count = self.take("<IQ")
            if element in (_STRING, _ARRAY):
                return [self.value(element) for _ in range(count)]
            return self.numbers(element, count).tolist()
        number = self.numbers(code, 1)[0]
        # As it was written before it was stored in 32 bits: 1e-05, not 9.999999747378752e-06.
        return float(str(number)) if number.dtype == np.float32 else number.item()

    def numbers(self, code: int, count: int) -> np.ndarray:
        if code not in _NUMBERS:
            raise ValueError(f"a value has the type {code}")
        kind = _NUMBERS[code]
        values = np.frombuffer(self.data[self.at : self.at + count * kind.itemsize], kind, count)
        self.at += count * kind.itemsize
        return values
