"""Opens GGUF files: metadata by name, and where each tensor is.

Source: ggml's docs/gguf.md. The package gguf can read them too, but takes 20 times as long for the tokens of a vocabulary.
"""

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.files import open_regular

_NUMBERS = {code: np.dtype(kind) for code, kind in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))}
_NUMBERS |= {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
"""Types of values by their codes."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
MAX_DIMENSIONS = 4
"""Most dimensions of a tensor: ggml's limit."""
MAX_TENSORS = 2**17
MAX_VALUES = 3 * 2**20
"""Most values of the metadata, those in arrays included; a vocabulary of 256k tokens with scores, types and merges has 1.3 million."""
MAX_TEXT_BYTES = 64 * 2**20
"""Most bytes of all texts in the metadata together."""
MAX_DEPTH = 4
"""Deepest nesting of arrays."""
MAX_ALIGNMENT = 2**16
_ARRAY_VALUES = 8
"""Values that an array in an array counts as, because reading it takes as long."""
_LEAST_VALUE, _LEAST_TENSOR = 13, 32
"""Bytes of the shortest value with its name, and of the shortest description of a tensor."""
_LEAST_ELEMENT = {_STRING: 8, _ARRAY: 12}
"""Bytes of an element of an array that is no number."""


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
                    f"{part} is not a GGUF file, truncated or corrupt ({type(error).__name__}: {shortened(str(error))}); download or "
                    "copy it again"
                ) from error
            if double := self.tensors.keys() & tensors.keys():
                raise ModelLoadError(
                    f"{part} has the tensor {shortened(min(double))}, which another part has too; download it again"
                )
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
    with open_regular(file) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.at = 4
        version, num_tensors, num_values = cursor.take("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"its version is {version:#x}, supported: 2 and 3, with the lower byte first")
        cursor.check_count(num_values, _LEAST_VALUE, "values", MAX_VALUES)
        cursor.check_count(num_tensors, _LEAST_TENSOR, "tensors", MAX_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            _add(metadata, cursor.string(), cursor.value(*cursor.take("<I")))
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name, (num_dimensions,) = cursor.string(), cursor.take("<I")
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"{shortened(name)} has {num_dimensions} dimensions, must have 1 to {MAX_DIMENSIONS}")
            shape = cursor.take(f"<{num_dimensions}Q")[::-1]
            _add(found, name, (shape, *cursor.take("<IQ")))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in {1 << i for i in range(MAX_ALIGNMENT.bit_length())}:
            raise ValueError(f"general.alignment is {alignment!r}, must be a power of 2 up to {MAX_ALIGNMENT}")
        start = -(-cursor.at // alignment) * alignment
        tensors = {name: _stored(file, name, shape, code, start + offset) for name, (shape, code, offset) in found.items()}
        end = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > len(data):
            raise ValueError(f"it has {len(data)} bytes, its tensors end at {end}")
    return metadata, tensors


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if name in found:
        raise ValueError(f"it has {shortened(name)} twice")
    found[name] = value


def _stored(file: Path, name: str, shape: tuple[int, ...], code: int, start: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(code)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_values or min(shape) < 1:
        raise ValueError(
            f"{shortened(name)} has the shape {shape}, must have sizes of at least 1 and rows of whole blocks of {block_values} values"
        )
    return StoredTensor(file, kind.name, shape, start, math.prod(shape) // block_values * block_bytes)


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0
        self._num_values = 0
        self._num_text_bytes = 0

    def check_count(self, count: int, least_bytes: int, what: str, most: int) -> None:
        """Raise ValueError if the rest of the file cannot hold so many, or there are more than an engine reads."""
        left = max(0, len(self.data) - self.at)
        if count > left // least_bytes:
            raise ValueError(f"it should have {count} {what}, {left} bytes follow")
        if count > most:
            raise ValueError(f"it has {count} {what}, at most {most} are read")

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
        self._num_text_bytes += length
        if self._num_text_bytes > MAX_TEXT_BYTES:
            raise ValueError(f"its texts have more than {MAX_TEXT_BYTES} bytes, which is the limit")
        return self.data[start : self.at].decode()

    def value(self, code: int, depth: int = 0) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            element, count = self.take("<IQ")
            if depth == MAX_DEPTH:
                raise ValueError(f"its arrays nest deeper than {MAX_DEPTH}, which is the limit")
            least_bytes = _LEAST_ELEMENT.get(element) or self._kind(element).itemsize
            weight = _ARRAY_VALUES if element == _ARRAY else 1
            self.check_count(count, least_bytes, "values in an array", (MAX_VALUES - self._num_values) // weight)
            self._num_values += count * weight
            if element in _LEAST_ELEMENT:
                return [self.value(element, depth + 1) for _ in range(count)]
            return self.numbers(element, count).tolist()
        number = self.numbers(code, 1)[0]
        # As it was written before it was stored in 32 bits: 1e-05, not 9.999999747378752e-06.
        return float(str(number)) if number.dtype == np.float32 else number.item()

    def _kind(self, code: int) -> np.dtype:
        if code not in _NUMBERS:
            raise ValueError(f"a value has the type {code}")
        return _NUMBERS[code]

    def numbers(self, code: int, count: int) -> np.ndarray:
        kind = self._kind(code)
        values = np.frombuffer(self.data[self.at : self.at + count * kind.itemsize], kind, count)
        self.at += count * kind.itemsize
        return values
