"""Offers cache tiers the contents that leave the block pool."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.store_filter import StoreFilter

if TYPE_CHECKING:
    from jaxllm.scheduler.block_pool import BlockPool

_COLD_PART = 1 / 8
"""Tiers are offered cold blocks whenever so large a part of these was allocated: to look at them takes time."""
_MOST_WAITS = 8
"""Steps, while requests run, that computed contents wait for others to be copied with them."""


class Storing:
    """Stores contents of blocks in tiers: most of them some steps before they are evicted, the others in the step that evicts them. If
    wanted, each some steps after it is computed."""

    def __init__(
        self,
        pool: "BlockPool",
        tiers: Sequence[CacheTier],
        store_filter: StoreFilter | None,
        *,
        stores_computed: bool = False,
    ):
        """store_filter: which contents tiers are offered; None: none. stores_computed: whether they get contents before these are about to
        be evicted."""
        self._pool, self._tiers, self._filter = pool, tiers, store_filter
        self.stores_computed = stores_computed and bool(tiers)
        self._computed: dict[bytes, None] = {}
        """Contents that requests computed, or found, and that may not be stored."""
        self._num_waits = 0
        """Steps that these have waited for more."""
        self._most_waiting = min((tier.copy_blocks for tier in tiers), default=0)
        self._leaving: dict[bytes, int] = {}
        """Contents that leave the pool in this step, with the blocks that have them until it runs."""
        self._used: set[bytes] = set()
        """Leaving contents that requests found while they were in the pool."""
        self._num_allocated = 0
        """Blocks that were allocated when tiers were last offered cold ones."""
        self._num_cold = max((tier.num_cold for tier in tiers), default=0)
        pool.evicting = None if store_filter is None else self._note_eviction

    def note_computed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The step that is being planned, or an earlier one, computes the contents of these blocks; or a request found them, so that the
        filter may let them pass now."""
        if self.stores_computed:
            self._computed.update((block.block_hash, None) for block in blocks if block.block_hash is not None)

    @property
    def is_behind(self) -> bool:
        """Whether computed contents are still to be stored."""
        return self.stores_computed and (bool(self._computed) or any(tier.is_storing for tier in self._tiers))

    def begin_step(self, *, stores_cold: bool, others_run: bool = False) -> list[AnyDeviceOp]:
        """A step is about to be planned. Returns the operations that store computed contents, and cold ones if wanted, as far as it is time
        for that. others_run: whether requests run, whose steps will come."""
        if self._leaving:  # of a step that could not be planned
            self._leaving.clear()
            self._used.clear()
        ops = self._store_computed(may_wait=others_run) if self._computed else []
        num_allocated = self._pool.num_allocated
        if stores_cold and self._num_cold and num_allocated - self._num_allocated >= _COLD_PART * self._num_cold:
            self._num_allocated = num_allocated
            ops += self.store_ahead(self._num_cold)
        return ops

    def _store_computed(self, *, may_wait: bool) -> list[AnyDeviceOp]:
        """Store what earlier steps computed, many contents at a time. What finds no room is offered again, as long as a block has it."""
        self._num_waits += 1
        if may_wait and len(self._computed) < self._most_waiting and self._num_waits < _MOST_WAITS:
            return []
        self._num_waits = 0
        offered = self._offered(block for name in self._computed if (block := self._pool.find(name)) is not None)
        ops = self._store_ahead(offered)
        wanted = {name for tier in self._tiers for name in tier.wants(list(offered))}
        self._computed = {name: None for name in offered if name in wanted}
        return ops

    def end_step(self) -> list[AnyDeviceOp]:
        """A step is planned. Returns the operations that store the contents which leave in it."""
        if not self._leaving:
            return []
        ids, names = list(self._leaving.values()), list(self._leaving)
        ops = [op for tier in self._tiers for op in tier.store(ids, names, self._used)]
        self._leaving.clear()
        self._used.clear()
        return ops

    def store_ahead(self, count: int) -> list[AnyDeviceOp]:
        """Offer tiers the contents of the next `count` free blocks, so that much is copied at a time, and little when blocks are needed."""
        return self._store_ahead(self._offered(self._pool.cold(count)))

    def _store_ahead(self, offered: Mapping[bytes, KVCacheBlock]) -> list[AnyDeviceOp]:
        if not offered:
            return []
        ids, names = [block.block_id for block in offered.values()], list(offered)
        used = {name for name, block in offered.items() if block.num_hits}
        return [op for tier in self._tiers for op in tier.store_ahead(ids, names, used)]

    def unstored(self, blocks: Iterable[KVCacheBlock]) -> set[bytes]:
        """The contents of blocks that tiers are to store and have not."""
        names = list(self._offered(blocks))
        return {name for tier in self._tiers for name in tier.wants(names)}

    def _offered(self, blocks: Iterable[KVCacheBlock]) -> dict[bytes, KVCacheBlock]:
        return {} if self._filter is None else self._filter.passing(blocks)

    def _note_eviction(self, blocks: Sequence[KVCacheBlock]) -> None:
        offered = self._offered(blocks)
        self._leaving.update((name, block.block_id) for name, block in offered.items())
        self._used.update(name for name, block in offered.items() if block.num_hits)
