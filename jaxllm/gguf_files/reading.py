"""Opens GGUF files, by the package gguf: metadata by name, and where each tensor is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ModelLoadError


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
            from gguf import GGUFReader
        except ImportError as error:
            raise ModelLoadError(
                f"{self.file} is a GGUF file, for which the package gguf is missing: pip install gguf"
            ) from error
        self.tensors: dict[str, StoredTensor] = {}
        for part in parts:
            try:
                reader = GGUFReader(part)
                stored = {tensor.name: _stored(part, tensor) for tensor in reader.tensors}
            except Exception as error:  # what the reader raises for broken files is of any type
                raise ModelLoadError(
                    f"{part} is not a GGUF file, truncated or corrupt ({type(error).__name__}: {error}); download or copy it again"
                ) from error
            if part == self.file:
                self._reader = reader
            self.tensors |= stored

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Its values by name; arrays are lists."""
        return {name: _value(field) for name, field in self._reader.fields.items()}

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return str(self._field("general.architecture"))

    def value(self, name: str) -> Any:
        """A value of the architecture; None if it is absent."""
        return self._field(f"{self.architecture}.{name}")

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else _value(field)


def _value(field: Any) -> Any:
    value = field.contents()
    # As it was written before it was stored in 32 bits: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if field.types and field.types[0].name == "FLOAT32" else value


def _stored(file: Path, tensor: Any) -> StoredTensor:
    shape = tuple(map(int, tensor.shape[::-1]))
    return StoredTensor(file, tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes))
