"""Copies between rows of a staging buffer and slots of host memory, as JAX and NumPy make them: for CPUs."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import jax
import numpy as np

from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies.arena import Arena, Region

Waiting = Callable[[], tuple[jax.Array, float]]
"""Waits for a copy. Returns its staging buffer, or another one in its place, and the seconds of the copy alone."""
Loading = Callable[[], tuple[np.ndarray, float]]
"""Waits for a load. Returns bool [n], which blocks have their content, and the seconds of the copy from the host alone."""
Addresses = Mapping[int, tuple[int, ...]]
"""Where each array of a cache begins, by device's ordinal."""


class Transfer(Protocol):
    """Copies staging buffers to slots, one after the other. One thread calls `to_host`, one what it returns; no program uses the buffer
    meanwhile. After an error none of its copies is under way. The way back differs: see `PlainTransfer` and `CudaTransfer`."""

    def to_host(self, staging: jax.Array, slots: Sequence[int]) -> Waiting:
        """Copy the first rows of a staging buffer, each to its slot."""

    def add_region(self, number: int, region: Region, stop: threading.Event) -> None:
        """See Regions. Any thread calls it."""

    def remove_region(self, number: int) -> None:
        """No copy reads them any more."""

    def close(self) -> None:
        """Release what it holds of host and devices."""


class PlainTransfer:
    """A Transfer that replaces staging buffers. Who waits for a copy makes it."""

    def __init__(self, arena: Arena, format: BlockFormat):
        self._arena, self._format = arena, format

    def to_host(self, staging: jax.Array, slots: Sequence[int]) -> Waiting:
        return partial(_timed, self._to_host, staging, slots)

    def to_device(self, staging: jax.Array, slots: Sequence[int]) -> Waiting:
        """Copy slots to the first rows of a buffer in place of this one."""
        return partial(_timed, self._to_device, staging, slots)

    def _to_host(self, staging: jax.Array, slots: Sequence[int]) -> jax.Array:
        for device, shard in by_device(staging):
            if device % self._format.num_copies == 0:
                self._arena.words[slots, device // self._format.num_copies] = np.asarray(shard)[0, : len(slots)]
        return staging

    def _to_device(self, staging: jax.Array, slots: Sequence[int]) -> jax.Array:
        parts = []
        for device, shard in by_device(staging):
            # New memory: on a CPU an array may share that of the host array which it was made of.
            rows_1Nw = np.zeros(shard.shape, np.uint32)
            rows_1Nw[0, : len(slots)] = self._arena.content(slots, device // self._format.num_copies)
            parts.append(jax.device_put(rows_1Nw, shard.sharding))
        return jax.make_array_from_single_device_arrays(staging.shape, staging.sharding, parts)

    def add_region(self, number: int, region: Region, stop: threading.Event) -> None:
        """The arena has it."""

    def remove_region(self, number: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def _timed(
    copy: Callable[[jax.Array, Sequence[int]], jax.Array], staging: jax.Array, slots: Sequence[int]
) -> tuple[jax.Array, float]:
    start = time.perf_counter()
    return copy(staging, slots), time.perf_counter() - start


def by_device(staging: jax.Array) -> list[tuple[int, jax.Array]]:
    """The part of each device, with its position on the mesh."""
    found = [(shard.index[0].start or 0, shard.data) for shard in staging.addressable_shards]
    return sorted(found, key=lambda each: each[0])
