"""Copies between rows of a staging buffer and slots of host memory, as JAX and NumPy make them: for CPUs."""

from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from jaxllm.runner.features.block_copies.arena import Arena
from jaxllm.runner.features.block_copies.format import BlockFormat


class Transfer(Protocol):
    """Copies that wait. One thread calls `to_host`, one `to_device`; no program uses the buffer meanwhile."""

    def to_host(self, staging: jax.Array, slots: Sequence[int]) -> None:
        """Copy the first rows of a staging buffer, each to its slot."""

    def to_device(self, staging: jax.Array, slots: Sequence[int]) -> jax.Array:
        """Copy slots to the first rows of a staging buffer. Returns it, or another one in its place."""

    def close(self) -> None:
        """Release what it holds of host and devices."""


class PlainTransfer:
    """A Transfer that replaces staging buffers."""

    def __init__(self, arena: Arena, format: BlockFormat):
        self._arena, self._format = arena, format

    def to_host(self, staging: jax.Array, slots: Sequence[int]) -> None:
        for device, shard in by_device(staging):
            if device % self._format.num_copies == 0:
                self._arena.words[slots, device // self._format.num_copies] = np.asarray(shard)[0, : len(slots)]

    def to_device(self, staging: jax.Array, slots: Sequence[int]) -> jax.Array:
        parts = []
        for device, shard in by_device(staging):
            # New memory: on a CPU an array may share that of the host array which it was made of.
            rows_1Nw = np.zeros(shard.shape, np.uint32)
            rows_1Nw[0, : len(slots)] = self._arena.words[slots, device // self._format.num_copies]
            parts.append(jax.device_put(rows_1Nw, shard.sharding))
        return jax.make_array_from_single_device_arrays(staging.shape, staging.sharding, parts)

    def close(self) -> None:
        """Nothing is held."""


def by_device(staging: jax.Array) -> list[tuple[int, jax.Array]]:
    """The part of each device, with its position on the mesh."""
    found = [(shard.index[0].start or 0, shard.data) for shard in staging.addressable_shards]
    return sorted(found, key=lambda each: each[0])
