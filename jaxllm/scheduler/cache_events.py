"""Collects which blocks came into the prefix cache and which left it."""

from collections.abc import Iterable

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.scheduler.block_hash import HASH_BYTES


class EventCollector:
    """The changes since the last `take`. Outlives the block pool that reports to it.

    Covers the first group of layers alone. A cached prefix must be in all groups, and the first has every block of it where a
    layer has full attention, while those of a window have only the last ones: the walk along a prompt would stop there. So it does for
    models with windows alone, once the first blocks of a prompt were evicted: API servers then underestimate what is cached.
    """

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        """names: blocks that can be found already. The first update contains them all."""
        self.changes: dict[bytes, bool] = dict.fromkeys(names, True)
        """Whether a block can be found now, by hash. The block pool writes here; a block that came and went is one entry."""
        self._cleared = True

    def clear(self) -> None:
        """The prefix cache has become empty."""
        self.changes.clear()
        self._cleared = True

    def take(self) -> CacheEvents | None:
        """The changes since the last call; None if there are none."""
        if not (self.changes or self._cleared):
            return None
        stored = keys_of(name for name, is_stored in self.changes.items() if is_stored)
        removed = keys_of(name for name, is_stored in self.changes.items() if not is_stored)
        events = CacheEvents(self._cleared, stored, b"" if self._cleared else removed)
        self.changes.clear()
        self._cleared = False
        return events


def keys_of(names: Iterable[bytes]) -> bytes:
    """Keys of these blocks in updates. Those of groups after the first, whose names are longer, are left out."""
    return b"".join([name[:KEY_BYTES] for name in names if len(name) == HASH_BYTES])
