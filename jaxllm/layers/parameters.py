"""The parameters of a model: their paths, and what the layers declared of them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxllm.layers.source import AnySource
from jaxllm.parallel.axes import sharding
from jaxllm.weight_format import ParamSpec, WeightFormat

ParamPath = tuple[str | int, ...]
Axes = tuple[str, ...]


def parameters(model_or_state: nnx.Module | nnx.State) -> Iterator[tuple[ParamPath, nnx.Variable]]:
    """(path, variable) of every parameter, in the order of `jax.tree.leaves(nnx.state(model))`."""
    state = model_or_state if isinstance(model_or_state, nnx.State) else nnx.state(model_or_state)
    yield from nnx.to_flat_state(state)  # type: ignore[misc]


class Weight(NamedTuple):
    """A weight of a model: its format, and its parts, which are parameters."""

    path: ParamPath
    format: WeightFormat
    parts: dict[str, ParamSpec]

    def path_of(self, part: str) -> ParamPath:
        """The path of a part."""
        return (*self.path, part) if part else self.path

    @property
    def stored_parts(self) -> Mapping[str, ParamSpec]:
        """The parts that files have of it."""
        return self.parts if self.format.stored_parts is None else self.format.stored_parts

    def laid_out(self, arrays: Mapping[str, Array], mesh: Mesh) -> dict[ParamPath, Array]:
        """The arrays of its parameters, of those of its stored parts."""
        found = arrays if self.format.stored_parts is None else self.format.laid_out(arrays, self.parts, mesh)
        return {self.path_of(part): array for part, array in found.items()}


def weights(model: nnx.Module | nnx.State) -> list[Weight]:
    """Every weight, in the order of their first parameters."""
    found: dict[ParamPath, Weight] = {}
    for path, variable in parameters(model):
        format, part, init = map(variable.get_metadata, ("format", "part", "init"))
        path = path[:-1] if part else path
        weight = found.setdefault(path, Weight(path, format, {}))
        weight.parts[part] = ParamSpec(variable.shape, axes_of(variable), str(variable.dtype), source_of(variable), init)
    return list(found.values())


def state_of(model: nnx.Module, arrays: dict[ParamPath, Any]) -> nnx.State:
    """The model's state with these arrays in it."""
    return nnx.from_flat_state([(path, variable.replace(arrays[path])) for path, variable in parameters(model)])


def abstract_state(model: nnx.Module, mesh: Mesh) -> nnx.State:
    """The model's state as it will be loaded: shapes, types and shardings in place of arrays."""
    return state_of(
        model,
        {
            path: jax.ShapeDtypeStruct(variable.shape, jnp.dtype(variable.dtype), sharding=sharding(mesh, axes_of(variable)))
            for path, variable in parameters(model)
        },
    )


def zeros(model: nnx.Module, mesh: Mesh) -> nnx.State:
    """The model's state with zeros, on the devices."""
    wanted = abstract_state(model, mesh)
    make = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted),
        out_shardings=jax.tree.map(lambda x: x.sharding, wanted),
    )
    return make()


def axes_of(variable: nnx.Variable) -> Axes:
    """The logical axes that the layer declared."""
    return variable.get_metadata("axes")


def source_of(variable: nnx.Variable) -> AnySource:
    """The tensors that the layer declared."""
    return variable.get_metadata("source")
