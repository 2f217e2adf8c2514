"""Maps each logical axis of a weight to the mesh axis that it is split over. Layers name only logical axes."""

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import TENSOR

MESH_AXES: dict[str, str | None] = {
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
    "kernel": None,
    "position": None,
    "draft_vocab": None,
    "experts": None,
    "expert_mlp": None,
    "split_experts": TENSOR,
    "copy": None,
    "slot": None,
    "rank": None,
}


def partition_spec(axes: Sequence[str]) -> PartitionSpec:
    """The sharding of an array with these logical axes."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))


def sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    """`partition_spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(axes))
