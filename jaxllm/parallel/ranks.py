"""The data-parallel ranks of a mesh, and joint arrays: those of all ranks, one after the other along the first dimension.

Each device, in a shard_map over the mesh, sees the arrays of its rank. A mesh without the axis `data` has one rank, whose arrays are
joint as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.parallel.mesh import DATA

T = TypeVar("T")


class Ranks:
    """The ranks of a mesh. With several hosts each rank is whole on one of them, and host arrays are the same on all."""

    def __init__(self, mesh: Mesh):
        self.num = mesh.shape.get(DATA, 1)
        """Number of ranks, on all hosts."""
        self.axis = DATA if self.num > 1 else None
        """The mesh axis that the first dimension of joint arrays is split over."""
        self.own = range(1)
        """The ranks that have devices of this process."""
        if self.num > 1:
            local = [i for i, row in enumerate(mesh.devices) if any(device in mesh.local_devices for device in row.flat)]
            self.own = range(local[0], local[-1] + 1)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a joint array, of that of one rank; of numbers it is one-dimensional."""
        if self.num == 1:
            return shape
        first, *rest = shape or (1,)
        return (self.num * first, *rest)

    def joined(self, parts: Sequence[Any]) -> Any:
        """The host arrays of all ranks as one."""
        return parts[0] if self.num == 1 else np.concatenate([np.atleast_1d(part) for part in parts])

    def repeated(self, array: Any) -> Any:
        """A host array that is the same in all ranks."""
        return self.joined([array] * self.num)

    def rounds(self, parts: Sequence[Iterable[tuple[Any, ...]]], nothing: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Joint arrays for calls of a program that does one thing of each rank at a time. parts: host arrays of each thing, by rank;
        nothing: those that do nothing, for ranks with fewer things than others."""
        for of_ranks in zip_longest(*parts, fillvalue=nothing):
            yield tuple(map(self.joined, zip(*of_ranks, strict=True)))

    def split(self, joint: T) -> list[T]:
        """A tree of joint arrays as trees of the arrays of each of `own`, which are on one device. Nothing is copied."""
        if self.num == 1:
            return [joint]
        leaves, structure = jax.tree.flatten(joint)
        parts = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
        step = len(parts[0]) // len(self.own) if parts else 1
        return [jax.tree.unflatten(structure, [part[i * step] for part in parts]) for i in range(len(self.own))]
