"""Weights as their own writers stored them, from tests/goldens/quantization/: see scripts/make_float_weight_goldens.py."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxllm.layers.source import Tensor
from tests.helpers import goldens
from tests.helpers.float_formats import E4M3

_TYPES = {"float32": "F32", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}


class Golden:
    """A file of them."""

    def __init__(self, name: str):
        self._arrays = np.load(goldens.FOLDER / "quantization" / f"{name}.npz")
        names = [key.split("/") for key in self._arrays.files]
        self.schemes = list(dict.fromkeys(name[0] for name in names))
        self.modules = list(dict.fromkeys(name[1] for name in names if len(name) > 2))

    def config(self, scheme: str) -> Any:
        return json.loads(str(self._arrays[f"{scheme}/config"]))

    def files(self, scheme: str, module: str) -> "StoredFiles":
        prefix = f"{scheme}/{module}/"
        arrays = {key.removeprefix(prefix): self._arrays[key] for key in self._arrays.files if key.startswith(prefix)}
        return StoredFiles(module, arrays)


class StoredFiles:
    """The tensors of a module, as formats see a checkpoint."""

    def __init__(self, module: str, arrays: dict[str, np.ndarray]):
        self.module, self.expected = module, arrays.pop("expected")
        self._tensors = {
            f"{module}.{name.removesuffix('.e4m3')}": array.view(E4M3) if name.endswith(".e4m3") else array
            for name, array in arrays.items()
        }
        self.linears = frozenset({module})
        self.entries: Mapping[str, Any] = {
            name: SimpleNamespace(shape=array.shape, dtype=_TYPES[str(array.dtype)]) for name, array in self._tensors.items()
        }
        self.weight = Tensor(f"{module}.weight", self.expected.shape, self.expected.shape)

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def stored(self, tensor: Tensor, index: Any) -> np.ndarray:
        return tensor.read(self.tensor(tensor.name), index)

    def arrays(self, format: Any) -> dict[str, np.ndarray]:
        """The parts of the weight, whose tensors are as the format says, and no others."""
        stored, scheme = format.stored(self.module, *self.expected.shape), format.scheme(self.module)
        ignored = {name for name in self._tensors if "input" in name}
        assert stored.keys() == self._tensors.keys() - ignored
        for name, tensor in stored.items():
            assert self.entries[name].shape == tensor.shape, name
            assert not tensor.dtypes or self.entries[name].dtype in tensor.dtypes, name
        names = ("codes", "scale", *("factor",) * scheme.factor)
        return {name: format.part(name, self.module, *self.expected.shape, self) for name in names}


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal but for the last bits."""
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
