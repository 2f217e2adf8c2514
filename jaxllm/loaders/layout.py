"""Converts parameters from their stored shape to the shape that a mesh needs: copies KV heads, pads the vocabulary."""

from collections.abc import Callable, Collection, Mapping, Sequence

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import ModelLoadError
from jaxllm.layers.parameters import Axes
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts.mlp import slots
from jaxllm.parallel.axes import num_parts, sharding

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def expand(array: Array, axes: Axes, shape: Sequence[int]) -> Array:
    """Bring a parameter of the stored shape to `shape`, which differs in copies of KV heads or of experts, in padding of the vocabulary,
    or in groups of inputs that devices share: their scales are repeated.

    With r copies, KV head k becomes heads k·r … k·r + r - 1, and each takes 1/r of its query heads, in order.
    """
    if tuple(array.shape) == tuple(shape):
        return array
    if "heads" in axes:
        return _copy_heads(array, axes, shape)
    if "split_experts" in axes:
        axis = axes.index("split_experts")
        return jnp.take(array, jnp.array(slots(array.shape[axis], shape[axis])), axis)
    if "split_groups" in axes:
        return jnp.repeat(array, shape[-1] // array.shape[-1], axis=-1)
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
