"""Offers cache tiers the contents that leave the block pool."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.store_filter import StoreFilter

if TYPE_CHECKING:
    from jaxllm.scheduler.block_pool import BlockPool

_COLD_PART = 1 / 8
"""Tiers are offered cold blocks whenever so large a part of these was allocated: to look at them takes time."""


class Storing:
    """Stores contents of blocks in tiers: most of them some steps before they are evicted, the others in the step that evicts them."""

    def __init__(self, pool: "BlockPool", tiers: Sequence[CacheTier], store_filter: StoreFilter | None):
        """store_filter: which contents tiers are offered; None: none."""
        self._pool, self._tiers, self._filter = pool, tiers, store_filter
        self._leaving: dict[bytes, int] = {}
        """Contents that leave the pool in this step, with the blocks that have them until it runs."""
        self._used: set[bytes] = set()
        """Leaving contents that requests found while they were in the pool."""
        self._num_allocated = 0
        """Blocks that were allocated when tiers were last offered cold ones."""
        self._num_cold = max((tier.num_cold for tier in tiers), default=0)
        pool.evicting = None if store_filter is None else self._note_eviction

    def begin_step(self, *, stores_cold: bool) -> list[AnyDeviceOp]:
        """A step is about to be planned. Returns the operations that store cold contents, if it is time for that and wanted."""
        if self._leaving:  # of a step that could not be planned
            self._leaving.clear()
            self._used.clear()
        num_allocated = self._pool.num_allocated
        if stores_cold and self._num_cold and num_allocated - self._num_allocated >= _COLD_PART * self._num_cold:
            self._num_allocated = num_allocated
            return self.store_ahead(self._num_cold)
        return []

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
        if not (offered := self._offered(self._pool.cold(count))):
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
