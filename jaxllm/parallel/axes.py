"""Maps each logical axis of a weight to the mesh axes that it is split over. Layers name only logical axes."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import DATA, TENSOR

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
    "group": None,
    "qkv": None,
    "head": None,
    "latent": None,
    "gate_up": None,
    "kv": None,
    "activation": None,
    "kernel": None,
    "position": None,
    "groups": None,
    "split_groups": TENSOR,
    "tiles": None,
    "split_tiles": TENSOR,
    "draft_vocab": None,
    "experts": None,
    "expert_mlp": None,
    "split_experts": (DATA, TENSOR),
    "copy": None,
    "slot": None,
    "rank": None,
    "vision": None,
    "audio": None,
    "class": None,
    "index": None,
}


def partition_spec(axes: Sequence[str], mesh_axes: Sequence[str] = (TENSOR,)) -> PartitionSpec:
    """The sharding of an array with these logical axes over a mesh with these axes."""
    found = (tuple(name for name in _mesh_axes(axis) if name in mesh_axes) for axis in axes)
    return PartitionSpec(*(names if len(names) > 1 else (*names, None)[0] for names in found))


def sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    """`partition_spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(axes, mesh.axis_names))


def num_parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Number of equal parts of an array with these logical axes over a mesh of these sizes."""
    return math.prod(sizes.get(name, 1) for axis in axes for name in _mesh_axes(axis))


def _mesh_axes(axis: str) -> tuple[str, ...]:
    found = MESH_AXES[axis]
    return (found,) if isinstance(found, str) else found or ()
