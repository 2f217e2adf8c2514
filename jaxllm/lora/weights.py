"""The file with an adapter's tensors: safetensors, or PyTorch's form, which is read without PyTorch."""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np

from jaxllm.errors import AdapterError, ModelLoadError
from jaxllm.files import open_regular
from jaxllm.loaders import pytorch, safetensors
from jaxllm.loaders.checkpoint import NUMPY_TYPES, TensorEntry

NAMES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The first that a directory has is read."""
_MAX_SPREAD = 8
"""Bytes that are read for one of a tensor, which may be a view of larger values."""

_PIECE_BYTES = 1 << 20
"""Bytes that are hashed at a time."""


class _Safetensors(safetensors.Checkpoint):
    INDEX: ClassVar[str] = ""
    PATTERNS: ClassVar[tuple[str, ...]] = NAMES[:1]


class _PyTorch(pytorch.Checkpoint):
    INDEX: ClassVar[str] = ""
    PATTERNS: ClassVar[tuple[str, ...]] = NAMES[1:]


class WeightsFile:
    """An adapter's tensors by name. Only headers are read at once; a file that changes afterwards is noticed."""

    def __init__(self, directory: Path, max_tensors: int):
        """Raises AdapterError if there is no such file, or it is broken."""
        self._directory = directory
        try:
            self._file = next(file for name in NAMES if (file := directory / name).is_file())
            self._identity = _identity(self._file.stat())
            self._checkpoint = (_Safetensors if self._file.suffix == ".safetensors" else _PyTorch)(
                directory, max_tensors=max_tensors
            )
        except StopIteration:
            raise AdapterError(f"adapter {directory}: {_not_found(directory)}") from None
        except ModelLoadError as error:
            raise AdapterError(f"adapter {directory}: {error}; save or copy it again") from error
        except OSError as error:
            raise AdapterError(f"adapter {directory}: cannot read its weights ({error}); restore them") from error

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._checkpoint.entries

    def values(self, name: str) -> np.ndarray:
        """A tensor in float32. Raises AdapterError if the file was deleted or changed."""
        entry = self.entries[name]
        needed = math.prod(entry.shape) * NUMPY_TYPES[entry.dtype].itemsize
        if entry.num_bytes > _MAX_SPREAD * needed:
            raise AdapterError(
                f"adapter {self._directory}: {name} has {needed} bytes, spread over {entry.num_bytes} of {self._file.name}; "
                "save the adapter again in safetensors"
            )
        # No memory map: the process would end if the file became shorter.
        with self._opened() as stream:
            stream.seek(entry.start)
            data = np.frombuffer(stream.read(entry.num_bytes), np.uint8)
        if len(data) < entry.num_bytes:
            raise self._changed()
        return self._checkpoint.decoded(name, data).astype(np.float32, copy=False)

    def add_to(self, digest: "hashlib._Hash") -> None:
        """Hash the whole file. Raises AdapterError as `values`."""
        with self._opened() as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with open_regular(self._file) as stream:
                if _identity(os.fstat(stream.fileno())) != self._identity:
                    raise self._changed()
                yield stream
        except OSError as error:
            raise AdapterError(
                f"adapter {self._directory}: cannot read {self._file.name} ({error.strerror}); restore it and load it again"
            ) from error

    def _changed(self) -> AdapterError:
        return AdapterError(f"adapter {self._directory}: {self._file.name} was changed after it was checked; load it again")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _not_found(directory: Path) -> str:
    others = [file.name for pattern in ("*.safetensors", "*.bin", "*.pt") for file in sorted(directory.glob(pattern))]
    found = f"; it has {', '.join(others[:3])}" if others else ""
    return f"it has no weights ({', '.join(NAMES)}){found}; give the directory that PEFT's save_pretrained wrote"
