"""Reads the weights of GGUF files, widened while reading, under the names and in the order of a Hugging Face checkpoint."""

import concurrent.futures
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.blocks import SUFFIX
from jaxllm.gguf_files.families import Family, family_of, transformers_name
from jaxllm.gguf_files.reading import GgufFile
from jaxllm.loaders import checkpoint
from jaxllm.loaders.checkpoint import TensorEntry

READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""ggml's names of the number formats that are widened."""
_VALUES_AT_ONCE = 1 << 16
"""Values that a thread widens at once: what it makes on the way stays in a core's cache."""


@dataclass(frozen=True)
class _Stored:
    """How a file holds a tensor."""

    type: str
    heads: int = 0
    """Heads whose values that turn together are neighbours; 0: none are."""
    offset: float = 0.0
    """Number that was added to its values."""


class Checkpoint(checkpoint.Checkpoint):
    """GGUF files, of which the first has the metadata of all."""

    INDEX = ""
    PATTERNS = ("*.gguf",)

    def __init__(self, directory: Path, dtype: str = "float32"):
        self._stored: dict[str, _Stored] = {}
        self._model = GgufFile(self.files(directory))
        self._latest: tuple[str, np.ndarray] | None = None
        """A tensor that was widened, because several devices read their parts of it in turn."""
        self._threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        """NumPy computes without Python's lock."""
        super().__init__(directory, dtype)

    def read_entries(self, file: Path) -> Mapping[str, TensorEntry]:
        family = family_of(self._model)
        entries = {}
        for stored_name, tensor in self._model.tensors.items():
            name = transformers_name(stored_name, family)
            if name is not None and tensor.file == file:
                dtype = "F32" if tensor.type in READABLE else tensor.type
                heads = self._permuted_heads(name, family)
                if heads and tensor.shape[0] % (2 * heads):
                    raise ModelLoadError(
                        f"{file}: {stored_name} has {tensor.shape[0]} rows, must have an even number for each of {heads} heads"
                    )
                entries[name] = TensorEntry(file, dtype, tensor.shape, tensor.start, tensor.num_bytes)
                offset = family.norm_offset if name.endswith("norm.weight") else 0.0
                self._stored[name] = _Stored(tensor.type, heads, offset)
        return entries

    def tensor(self, name: str) -> np.ndarray:
        """The tensor in the type of the checkpoint; behind blocks.SUFFIX the bytes that hold it, [rows, bytes]."""
        if name.endswith(SUFFIX):
            name = name.removesuffix(SUFFIX)
            rows, order = self._rows(name, self.bytes_of(name))
            return rows if order is None else rows[order]
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # before the next is made
            self._latest = name, super().tensor(name)
        return self._latest[1]

    def decoded(self, name: str, data: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, stored = self.entries[name].shape, self._stored[name]
        rows, order = self._rows(name, data)
        wide = np.empty((len(rows), shape[-1]), self.dtype)
        kind = GGMLQuantizationType[stored.type]

        def widen(start: int) -> None:
            part = slice(start, start + step)
            values = dequantize(np.ascontiguousarray(rows[part if order is None else order[part]]), kind)
            wide[part] = values - np.float32(stored.offset) if stored.offset else values

        step = max(1, _VALUES_AT_ONCE // shape[-1])
        starts = range(0, len(rows), step)
        list((self._threads.map if len(starts) > 1 else map)(widen, starts))
        if stored.heads and len(shape) == 1:  # a bias
            return wide.reshape(stored.heads, -1, 2).swapaxes(1, 2).reshape(shape)
        return wide.reshape(shape)

    def _rows(self, name: str, data: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The bytes of a tensor by row, and the order that the rows have in a Hugging Face checkpoint, if it is another one."""
        shape, heads = self.entries[name].shape, self._stored[name].heads
        rows = data.reshape(math.prod(shape[:-1]), -1)
        in_order = not heads or len(shape) == 1
        return rows, None if in_order else np.arange(len(rows)).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def _permuted_heads(self, name: str, family: Family) -> int:
        module = name.rpartition(".")[0].rpartition(".")[2]
        if not family.is_permuted or module not in ("q_proj", "k_proj"):
            return 0
        heads = self._model.value("attention.head_count")
        heads = heads if module == "q_proj" else self._model.value("attention.head_count_kv") or heads
        if type(heads) is not int or heads < 1:
            raise ModelLoadError(f"{self._model.file} has {heads!r:.100} heads, must have a positive number")
        return heads
