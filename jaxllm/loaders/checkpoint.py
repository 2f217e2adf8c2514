"""A Hugging Face checkpoint as its loaders see it: tensors by name, each read by memory map when it is used.

A format is a subclass: which files a directory has of it, and where the tensors are in such a file.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import ClassVar

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.files import open_regular, read_bounded

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The types that can be loaded, by safetensors' names."""
BYTES = "U8"
"""The type of packed weights."""
INTEGERS: dict[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I8": np.dtype(np.int8)}
"""The types of tables of numbers, and of weights that a format makes numbers of."""
EXPONENTS: dict[str, np.dtype] = {"F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)}
"""The type of scales that are powers of two."""
NUMPY_TYPES: dict[str, np.dtype] = {**DTYPES, BYTES: np.dtype(np.uint8), **INTEGERS, **EXPONENTS}
MAX_DIMS = 64
"""Dimensions of a tensor: NumPy has no more."""
MAX_NAME = 512
"""Characters of a tensor's name."""
MAX_TENSORS = 1_000_000
"""Tensors of a checkpoint."""
_MAX_INDEX_BYTES = 64 * 2**20
"""The index of 210 000 tensors of Kimi-K2-Thinking has 24 MB."""
_SHOWN = 10
"""Files that an error lists."""
_LFS_POINTER = b"version "


class _Index(msgspec.Struct):
    """The fields that are read from an index."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    file: Path
    dtype: str
    """A key of NUMPY_TYPES, or the name of a type that cannot be loaded."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file where the data begins."""
    num_bytes: int
    strides: tuple[int, ...] | None = None
    """Distance between neighbours of each dimension in bytes; None: row-major."""


class Checkpoint(ABC):
    """All tensors of a directory's files of one format. Each file is checked against its length at once."""

    INDEX: ClassVar[str]
    """The file that lists the files of a checkpoint in parts; empty if the format has none."""
    PATTERNS: ClassVar[tuple[str, ...]]
    """Names of files without an index, of which the first pattern that fits any counts."""

    def __init__(self, directory: Path, dtype: str = "float32", max_tensors: int = MAX_TENSORS):
        """dtype: of tensors whose files hold them in a form that is no array, and which are widened. max_tensors: of a file.

        Raises ModelLoadError if files are missing, truncated or not what they should be.
        """
        self.directory = directory
        self.dtype = np.dtype(dtype)  # ml_dtypes registers its dtypes with NumPy
        self.max_tensors = max_tensors
        self.entries: Mapping[str, TensorEntry] = self._read_all(self.files(directory))
        self._maps: dict[Path, np.memmap] = {}

    @classmethod
    def files(cls, directory: Path) -> list[Path]:
        """The files with the weights: those of the index, or those of its patterns; none if the directory has no such format."""
        index = directory / cls.INDEX
        if not cls.INDEX or not index.is_file():
            return next((files for pattern in cls.PATTERNS if (files := sorted(directory.glob(pattern)))), [])
        content = read_bounded(index, _MAX_INDEX_BYTES, ModelLoadError)
        try:
            if content.count(b",") > MAX_TENSORS:
                raise ValueError(f"it has more than {MAX_TENSORS} members")
            names = sorted(set(msgspec.json.decode(content, type=_Index).weight_map.values()))
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{index} is not an index of weight files: {error}") from error
        for name in names:
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                raise ModelLoadError(f"{index} names {name[:MAX_NAME]!r}, which is outside of its directory")
        missing = [name for name in names if not os.path.isfile(directory / name)]  # also of a name that is too long
        if missing:
            listed = ", ".join(name[:MAX_NAME] for name in missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
            raise ModelLoadError(
                f"{directory} lacks {len(missing)} of the {len(names)} files in {cls.INDEX}: {shortened(listed, 400)}"
            )
        return [directory / name for name in names]

    @abstractmethod
    def read_entries(self, file: Path) -> Mapping[str, TensorEntry]:
        """The tensors of a file by name. Raises ModelLoadError."""

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of the file. Nothing is read until the view is used."""
        return self.decoded(name, self.bytes_of(name))

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes that hold a tensor, as a read-only view of the file."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, dtype=np.uint8, mode="r")
        data = np.asarray(self._maps[entry.file][entry.start : entry.start + entry.num_bytes])
        if len(data) < entry.num_bytes:
            raise ModelLoadError(f"{entry.file} became shorter while it was read; load it again")
        return data

    def decoded(self, name: str, data: np.ndarray) -> np.ndarray:
        """The tensor that these bytes hold, which are all of its entry's."""
        entry = self.entries[name]
        values = data.view(NUMPY_TYPES[entry.dtype])
        if entry.strides is None:
            return values.reshape(entry.shape)
        return np.lib.stride_tricks.as_strided(values, entry.shape, entry.strides, writeable=False)

    def _read_all(self, files: Sequence[Path]) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for file in files:
            try:
                with open_regular(file) as stream:
                    size, begin = os.fstat(stream.fileno()).st_size, stream.read(len(_LFS_POINTER))
            except OSError as error:
                raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error
            if begin == _LFS_POINTER:
                raise ModelLoadError(
                    f"{file} is not the weights but a Git LFS pointer to them; run `git lfs pull` or download it"
                )
            for name, entry in self.read_entries(file).items():
                if entry.start + entry.num_bytes > size:
                    raise ModelLoadError(
                        f"{file} is truncated or corrupt: {name} ends at byte {entry.start + entry.num_bytes}, the file at {size}; "
                        "download or copy it again"
                    )
                if name in found:
                    raise ModelLoadError(f"{name} is both in {found[name].file} and in {file}; remove one of them")
                found[name] = entry
        return found


def span_bytes(dtype: np.dtype, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from the first value of a tensor to the end of its last; strides are in bytes, none is negative."""
    if math.prod(shape) == 0:
        return 0
    return dtype.itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
