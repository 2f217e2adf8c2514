"""The weights in tests/goldens/quantization that formats' own programs wrote, and what is read of them.

`scripts/make_gptq_awq_bitsandbytes_goldens.py` says how they were made.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.layers.source import Tensor
from jaxllm.quantization.formats.packed import PackedFormat
from tests.helpers.goldens import FOLDER

MODULE = "model.layers.0.self_attn.q_proj"
TYPES = {"int32": "I32", "float16": "F16", "float32": "F32", "uint8": "U8", "int8": "I8"}


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class Files:
    """A checkpoint of one module."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = {f"{MODULE}.{name}": array for name, array in tensors.items()}
        self.entries = {name: Entry(TYPES[str(array.dtype)], array.shape) for name, array in self._tensors.items()}
        self.linears = {MODULE}

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


def read(name: str, case: str) -> dict[str, np.ndarray]:
    """The tensors of a case, and its `values` of the first four and the last four outputs."""
    with np.load(FOLDER / "quantization" / f"{name}.npz") as arrays:
        return {key.removeprefix(f"{case}/"): arrays[key] for key in arrays if key.startswith(f"{case}/")}


def widen(format: PackedFormat, tensors: Mapping[str, np.ndarray], num_outputs: int, num_inputs: int) -> np.ndarray:
    """The float32 weights that are read, [outputs, inputs]."""
    files = Files(tensors)
    for name, expected in format.stored(MODULE, num_outputs, num_inputs).items():
        assert files.entries[name].shape == expected.shape and files.entries[name].dtype in expected.dtypes, name
    shape = (num_outputs, num_inputs)
    return format.widened(Tensor(f"{MODULE}.weight", shape, shape), (slice(None), slice(None)), files)  # type: ignore[arg-type]


def assert_exact(format: PackedFormat, tensors: dict[str, np.ndarray], num_outputs: int, num_inputs: int) -> None:
    """The weights that are read equal the golden to the bit."""
    values = tensors.pop("values")
    wide = widen(format, tensors, num_outputs, num_inputs)
    np.testing.assert_array_equal(np.concatenate([wide[:4], wide[-4:]]), values)
