"""Arrays of all lanes and of one: the same memory under two names. Other hosts may have some of the lanes.

A joint array lies on the devices of all lanes. Its first dimension holds the lanes' arrays one after the other, but for weights: those
are the same in every lane, except experts, of which each lane holds a part. Nothing is copied either way, so what a program takes by
one name is gone under the other.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import DATA
from jaxllm.runner.weights import Weights


def joined(parts: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """The arrays of all lanes as one. parts: those of this process."""
    pieces = [shard.data for part in parts for shard in part.addressable_shards]
    num_lanes = sharding.num_devices * len(parts) // len(pieces)
    first, *rest = parts[0].shape
    return jax.make_array_from_single_device_arrays((num_lanes * first, *rest), sharding, pieces)


def parts_of(joint: jax.Array, places: Sequence[NamedSharding], shape: tuple[int, ...] | None = None) -> list[jax.Array]:
    """Each lane's part of a joint array, with its sharding there. places: in the lanes of this process. shape: of the part; None: an equal
    share of the first dimension."""
    pieces = [shard.data for shard in joint.addressable_shards]
    size = len(pieces) // len(places)
    if shape is None:
        num_lanes = joint.sharding.num_devices // size
        shape = (joint.shape[0] // num_lanes, *joint.shape[1:])
    return [
        jax.make_array_from_single_device_arrays(shape, place, pieces[i * size : (i + 1) * size])
        for i, place in enumerate(places)
    ]


def shape_in_lane(joint: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape and sharding in a lane of what is split over lanes, or the same in all of them."""
    shape, spec = list(joint.shape), list(joint.sharding.spec)
    for i, axes in enumerate(spec):
        names = (axes,) if isinstance(axes, str) else axes or ()
        if DATA in names:
            shape[i] //= joint.sharding.mesh.shape[DATA]
            rest = tuple(name for name in names if name != DATA)
            spec[i] = rest[0] if rest else None
    return jax.ShapeDtypeStruct(tuple(shape), joint.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


class LaneWeights(Weights):
    """The weights of one lane: of experts its part, which no program of its own computes with."""

    def __init__(self, joint: Weights, mesh: Mesh):
        self.structures, self.parts, self.merges = joint.structures, joint.parts, joint.merges
        self.shapes = tuple(shape_in_lane(shape, mesh) for shape in joint.shapes)
