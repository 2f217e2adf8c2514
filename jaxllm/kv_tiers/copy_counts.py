"""Counts the copies between devices and host memory, and the blocks that were lost because there was none."""

import time
from collections.abc import Callable

from jaxllm.log import logger
from jaxllm.observations import COPY_BYTES, COPY_SECONDS, Observations

WARN_SECONDS = 60.0
"""Lost blocks are looked at this often, so that warnings come no faster."""
WARN_SHARE = 0.1
"""Smallest part of the blocks, of those that left the devices, whose loss is worth a warning."""
WARN_BLOCKS = 100
"""And how many it must be."""


class CopyCounts:
    """Copies in one direction."""

    def __init__(self) -> None:
        self.bytes, self.seconds = Observations(COPY_BYTES), Observations(COPY_SECONDS)

    def note(self, num_bytes: int, seconds: float) -> None:
        """A copy is over."""
        self.bytes.add(num_bytes)
        self.seconds.add(seconds)


class LostBlocks:
    """Blocks that left the devices uncopied. Warns if they are many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.num_without_slot = 0
        """Because copies used all slots."""
        self.num_without_buffer = 0
        """Because copies used all staging buffers: they are behind."""
        self._clock, self._since = clock, clock()
        self._num_stored, self._num_lost, self._num_lost_for_slots = 0, 0, 0
        """Since `_since`."""

    def note_stored(self, num_blocks: int) -> None:
        """Blocks are being copied."""
        self._num_stored += num_blocks

    def note(self, num_blocks: int, *, for_slots: bool) -> None:
        """Blocks left uncopied. for_slots: because there was no slot for them."""
        if for_slots:
            self.num_without_slot += num_blocks
            self._num_lost_for_slots += num_blocks
        else:
            self.num_without_buffer += num_blocks
        self._num_lost += num_blocks
        if (seconds := self._clock() - self._since) >= WARN_SECONDS:
            self._warn(seconds)
            self._since += seconds
            self._num_stored = self._num_lost = self._num_lost_for_slots = 0

    def _warn(self, seconds: float) -> None:
        num_all = self._num_lost + self._num_stored
        if self._num_lost < max(WARN_BLOCKS, WARN_SHARE * num_all):
            return
        if 2 * self._num_lost_for_slots > self._num_lost:
            why = "copies used all of host memory: raise --kv-offloading-size"
        else:
            why = (
                "copies are behind: give the devices more cache (--gpu-memory-utilization, a lower --max-num-seqs), or leave "
                "--kv-offloading-size out if few prompts come back (jaxllm:external_prefix_cache_hits_total)"
            )
        logger.warning(
            "host memory: %d of the %d blocks that left the devices in the last %.0f s were lost, because %s",
            self._num_lost,
            num_all,
            seconds,
            why,
        )
