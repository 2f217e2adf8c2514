"""Converts parameters from their stored shape to the shape that a mesh needs: copies KV heads, pads the vocabulary."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import ModelLoadError
from jaxllm.layers.source import AnySource
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts.mlp import slots
from jaxllm.parallel.axes import num_parts, sharding
from jaxllm.weight_format import ParamSpec, WeightFormat

ParamPath = tuple[str | int, ...]
Axes = tuple[str, ...]
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def parameters(model_or_state: nnx.Module | nnx.State) -> Iterator[tuple[ParamPath, nnx.Variable]]:
    """(path, variable) of every parameter, in the order of `jax.tree.leaves(nnx.state(model))`."""
    state = model_or_state if isinstance(model_or_state, nnx.State) else nnx.state(model_or_state)
    yield from nnx.to_flat_state(state)  # type: ignore[misc]


class Weight(NamedTuple):
    """A weight of a model: its format, and its parts, which are parameters."""

    format: WeightFormat
    paths: dict[str, ParamPath]
    parts: dict[str, ParamSpec]


def weights(model: nnx.Module | nnx.State) -> list[Weight]:
    """Every weight, in the order of their first parameters."""
    found: dict[ParamPath, Weight] = {}
    for path, variable in parameters(model):
        format, part, init = map(variable.get_metadata, ("format", "part", "init"))
        weight = found.setdefault(path[:-1] if part else path, Weight(format, {}, {}))
        weight.paths[part] = path
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


def expand(array: Array, axes: Axes, shape: Sequence[int]) -> Array:
    """Bring a parameter of the stored shape to `shape`, which differs in copies of KV heads or of experts or in padding of the vocabulary.

    With r copies, KV head k becomes heads k·r … k·r + r - 1, and each takes 1/r of its query heads, in order.
    """
    if tuple(array.shape) == tuple(shape):
        return array
    if "heads" in axes:
        return _copy_heads(array, axes, shape)
    if "split_experts" in axes:
        axis = axes.index("split_experts")
        return jnp.take(array, jnp.array(slots(array.shape[axis], shape[axis])), axis)
    axis = axes.index("vocab")
    padding = [(0, wanted - had) for wanted, had in zip(shape, array.shape, strict=True)]
    assert all(low_high == (0, 0) for i, low_high in enumerate(padding) if i != axis), "only the vocabulary is padded"
    return jnp.pad(array, padding)


def _copy_heads(array: Array, axes: Axes, shape: Sequence[int]) -> Array:
    axis = axes.index("heads")
    replicas = shape[axis] // array.shape[axis]
    before, after = tuple(shape[: axis + 1]), tuple(shape[axis + 2 :])
    if axes[axis + 1] == "group":
        return array.reshape(*before, -1, *after)
    if axes[axis + 1] != "qkv":
        return jnp.repeat(array, replicas, axis=axis)
    query, key_value = jnp.split(array, [array.shape[axis + 1] - 2], axis=axis + 1)
    return jnp.concatenate([query.reshape(*before, -1, *after), jnp.repeat(key_value, replicas, axis=axis)], axis=axis + 1)


def stored_sharding(mesh: Mesh, axes: Axes, shape: Sequence[int]) -> NamedSharding:
    """How to hold a parameter of the stored shape until it is expanded: split by its axes if they divide, else whole."""
    wanted = sharding(mesh, axes)
    divides = all(size % num_parts([axis], mesh.shape) == 0 for axis, size in zip(axes, shape, strict=True))
    return wanted if divides else NamedSharding(mesh, PartitionSpec(*(None,) * len(axes)))


def raise_on_misfit(
    source: object,
    config: ModelConfig,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str] = (),
    unreadable: Collection[str] = (),
) -> None:
    """Raise one ModelLoadError that names all missing, unused and misshapen weights, if there are any.

    `wanted` and `found` give shapes by name; `ignored` may be unused; `unreadable` are described already.
    """
    faults = {
        "missing": [name for name in wanted if name not in found],
        "unused": [name for name in found if name not in wanted and name not in ignored],
        "of the wrong shape": [
            f"{name} is {list(found[name])}, must be {list(shape)}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ],
        "of an unsupported type": unreadable,
    }
    told = [f"{len(names)} {what}: {_some(names)}" for what, names in faults.items() if names]
    if told:
        raise ModelLoadError(f"the weights in {source} do not fit its config.json ({config.architecture}): {'; '.join(told)}")


def _some(names: Collection[str], limit: int = 10) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")


def delete(arrays: Any) -> None:
    """Release the device memory of a tree of arrays at once, even if references to them remain."""
    for array in jax.tree.leaves(arrays):
        if isinstance(array, Array) and not array.is_deleted():
            array.delete()


def on_cpu(mesh: Mesh) -> bool:
    """Whether the mesh's memory is the host's."""
    device: jax.Device = mesh.devices.flat[0]
    return device.platform == "cpu"
