"""Collects which blocks came into the prefix cache and which left it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.scheduler.block_hash import HASH_BYTES

if TYPE_CHECKING:
    from jaxllm.scheduler.block_pool import BlockPool
    from jaxllm.scheduler.cache_tier import CacheTier


class PoolAndHost:
    """Blocks that a pool or the host memory of its tiers has."""

    def __init__(self, pool: "BlockPool", tiers: "Sequence[CacheTier]"):
        """tiers: from now on they report here."""
        self._pool, self._tiers = pool, tiers
        self.changed: set[bytes] = set()
        """Names of contents that came into host memory, or left it."""
        for tier in tiers:
            tier.changed = self.changed

    def snapshot(self) -> CacheEvents:
        """All of them."""
        in_host = (name for tier in self._tiers for name in tier.host_names())
        return CacheEvents(cleared=True, stored=keys_of({*self._pool.cached_hashes(), *in_host}))

    def take(self, changed: Iterable[bytes], *, cleared: bool) -> CacheEvents:
        """The changes since the last call. changed: names that came into the pool, or left it. cleared: all before is void."""
        names = self.changed.union(changed)
        self.changed.clear()
        if cleared:
            return self.snapshot()
        found = {name for name in names if self._pool.is_cached(name) or any(tier.is_in_host(name) for tier in self._tiers)}
        return CacheEvents(stored=keys_of(found), removed=keys_of(names - found))


class EventCollector:
    """The changes since the last `take`. Outlives the block pool that reports to it.

    Covers the first group of layers alone. A cached prefix must be in all groups, and the first has every block of it where a
    layer has full attention, while those of a window have only the last ones: the walk along a prompt would stop there. So it does for
    models with windows alone, once the first blocks of a prompt were evicted: API servers then underestimate what is cached.
    """

    def __init__(self, names: Iterable[bytes] = (), with_host: PoolAndHost | None = None) -> None:
        """names: blocks that can be found already. The first update contains them all. with_host: None if there is no host memory."""
        self.with_host = with_host
        self.changes: dict[bytes, bool] = dict.fromkeys(names, True)
        """Whether a block can be found now, by hash. The block pool writes here; a block that came and went is one entry."""
        self._cleared = True

    def clear(self) -> None:
        """The prefix cache has become empty."""
        self.changes.clear()
        self._cleared = True

    def take(self) -> CacheEvents | None:
        """The changes since the last call; None if there are none."""
        host = self.with_host
        if not (self.changes or self._cleared or (host is not None and host.changed)):
            return None
        stored = keys_of(name for name, is_stored in self.changes.items() if is_stored)
        removed = keys_of(name for name, is_stored in self.changes.items() if not is_stored)
        with_host = None if host is None else host.take(self.changes, cleared=self._cleared)
        events = CacheEvents(self._cleared, stored, b"" if self._cleared else removed, with_host)
        self.changes.clear()
        self._cleared = False
        return events


def keys_of(names: Iterable[bytes]) -> bytes:
    """Keys of these blocks in updates. Those of groups after the first, whose names are longer, are left out."""
    return b"".join([name[:KEY_BYTES] for name in names if len(name) == HASH_BYTES])
