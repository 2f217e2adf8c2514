"""Loads blocks that waiting requests need from cache tiers, and offers tiers what the pool evicts."""

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.store_filter import StoreFilter
from jaxllm.scheduler_stats import SchedulerStats

if TYPE_CHECKING:
    from jaxllm.scheduler.kv_cache_manager import KVCacheManager

_COLD_PART = 1 / 8
"""Tiers are offered cold blocks whenever so large a part of these was allocated: to look at them takes time."""


@dataclass(eq=False)
class _Copy:
    """The part of a load that one tier brings."""

    tier: CacheTier
    load_id: int
    blocks: list[KVCacheBlock]
    names: list[bytes]
    deadline: float


@dataclass(eq=False)
class _Load:
    """The blocks of a request that waits for some of them."""

    request: Request
    blocks: list[KVCacheBlock]
    """All that it holds, in the order of the sequence."""
    copies: list[_Copy] = field(default_factory=list)
    """Copies under way."""
    arrived: list[tuple[KVCacheBlock, bytes]] = field(default_factory=list)


class Loading:
    """The requests with the status WAITING_FOR_BLOCKS, and the tiers that they wait for.

    A request keeps its place among those that wait, and holds the blocks of its prefix. Once its load is over, what has arrived is in
    the prefix cache, where its admission finds it; what has not is computed.
    """

    def __init__(self, manager: "KVCacheManager", tiers: Sequence[CacheTier], store_filter: StoreFilter | None = None):
        """store_filter: which contents tiers are offered; None: all."""
        self._manager, self._tiers, self._store_filter = manager, tiers, store_filter
        self._loads: dict[str, _Load] = {}
        """Loads by request, in the order of their beginning."""
        self._arriving: set[bytes] = set()
        """Names of contents that a load brings."""
        self._ops: list[AnyDeviceOp] = []
        """Operations of the step that is being planned."""
        self._leaving: dict[bytes, int] = {}
        """Contents that leave the pool in this step, with the blocks that have them until it runs."""
        self._num_allocated = 0
        """Blocks that were allocated when tiers were last offered cold ones."""
        self._num_cold = max(tier.num_cold for tier in tiers)
        manager.pool.evicting = self._note_eviction

    def begin_step(self, step_id: int, done_step_id: int) -> None:
        """A step is about to be planned: process what has arrived."""
        self._ops = []
        self._leaving.clear()
        copies = {(copy.tier, copy.load_id): (load, copy) for load in self._loads.values() for copy in load.copies}
        for tier in self._tiers:
            found = tier.begin_step(step_id, done_step_id)
            self._ops += found.ops
            for load_id, is_right in found.loaded:
                load, copy = copies.pop((tier, load_id))
                self._end_copy(load, copy, is_right)
        now = time.monotonic()
        for load, copy in copies.values():
            if now >= copy.deadline:
                copy.tier.cancel(copy.load_id)
                self._end_copy(load, copy, [False] * len(copy.blocks))
        self._store_ahead()

    def take_ops(self) -> list[AnyDeviceOp]:
        """Take the operations for tiers in the step that is being planned, once it is."""
        if self._leaving:
            ids, names = list(self._leaving.values()), list(self._leaving)
            for tier in self._tiers:
                self._ops += tier.store(ids, names)
            self._leaving.clear()
        ops, self._ops = self._ops, []
        return ops

    def _end_copy(self, load: _Load, copy: _Copy, is_right: Iterable[bool]) -> None:
        load.copies.remove(copy)
        self._arriving.difference_update(copy.names)
        for block, name, right in zip(copy.blocks, copy.names, is_right, strict=True):
            if right:
                load.arrived.append((block, name))
            else:
                load.request.loads_blocks = False

    def begin(self, request: Request, num_cached_tokens: int, num_reserved_blocks: int) -> bool:
        """Begin to load blocks of a request behind a cached prefix, if tiers have them and there are free blocks for all of it. Returns
        whether it must wait: for them, or for a load of another request that brings some of them."""
        manager = self._manager
        if not request.loads_blocks or not manager.reads_cache(request):
            return False
        tier_of: dict[bytes, CacheTier] = {}
        absent = manager.absent_names(request)
        for tier in self._tiers:
            wanted = [name for name in absent if name not in tier_of]
            tier_of.update(dict.fromkeys(tier.match(wanted), tier))
        loadable = tier_of.keys() | self._arriving
        blocks = manager.blocks_of_prefix(request, loadable, num_cached_tokens) if loadable else None
        if blocks is None:
            return False
        names = [name for block, name in blocks if block is None]
        if not self._arriving.isdisjoint(names):
            return True
        found = [block for block, _ in blocks if block is not None]
        num_shared = sum(block.ref_count > 0 for block in found)
        num_needed = max(len(blocks), manager.num_blocks_for(request.num_tokens)) - num_shared
        if num_needed > manager.pool.num_free_blocks - num_reserved_blocks:
            return False
        manager.pool.touch(found)
        new_blocks = manager.pool.allocate(len(names))
        new = iter(new_blocks)
        load = _Load(request, [next(new) if block is None else block for block, _ in blocks])
        now = time.monotonic()
        for tier in self._tiers:
            part = [(block, name) for block, name in zip(new_blocks, names, strict=True) if tier_of[name] is tier]
            if part:
                own_blocks, own_names = map(list, zip(*part, strict=True))
                load_id = tier.load([block.block_id for block in own_blocks], own_names)
                load.copies.append(_Copy(tier, load_id, own_blocks, own_names, now + tier.patience_seconds))
        if request.num_cached_before_load is None:
            request.num_cached_before_load = num_cached_tokens
        self._arriving.update(names)
        self._loads[request.request_id] = load
        request.status = RequestStatus.WAITING_FOR_BLOCKS
        return True

    def is_under_way(self, request: Request) -> bool:
        """Whether the request must go on waiting."""
        load = self._loads.get(request.request_id)
        return load is not None and bool(load.copies)

    def end(self, request: Request) -> None:
        """Let a request go on without its load, if it has one. What has arrived is found in the prefix cache from now on."""
        load = self._loads.pop(request.request_id, None)
        if load is None:
            return
        for copy in load.copies:
            copy.tier.cancel(copy.load_id)
            self._arriving.difference_update(copy.names)
        for block, name in load.arrived:
            self._manager.pool.publish(block, name)
        self._manager.pool.free(load.blocks[::-1])
        request.status = request.waiting_status

    def end_latest(self, but: Container[Request] = ()) -> bool:
        """End the load that began last, because its blocks are needed, but none of these requests. Returns whether there was one."""
        latest = next((load.request for load in reversed(self._loads.values()) if load.request not in but), None)
        if latest is not None:
            self.end(latest)
        return latest is not None

    def wait(self, seconds: float) -> None:
        """Wait until the state of a load changes, if any is under way."""
        copies = [copy for load in self._loads.values() for copy in load.copies]
        if copies:
            copies[0].tier.wait(min(seconds, max(0.0, min(copy.deadline for copy in copies) - time.monotonic())))

    def discard(self, names: Sequence[bytes]) -> None:
        """Drop contents that were computed wrongly from all tiers."""
        for tier in self._tiers:
            tier.discard(names)

    def forget(self, *, stored: bool, external: bool = False) -> None:
        """See CacheTier. No load is under way, or its requests start over."""
        for tier in self._tiers:
            tier.forget(stored=stored, external=external)

    def _note_eviction(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._leaving.update(self._offered(blocks))

    def _offered(self, blocks: Iterable[KVCacheBlock]) -> dict[bytes, int]:
        """The contents of blocks that tiers are offered, with their block."""
        passes = None if self._store_filter is None else self._store_filter.passes
        return {block.block_hash: block.block_id for block in blocks if block.block_hash and (passes is None or passes(block))}

    def _store_ahead(self) -> None:
        """Offer tiers what is evicted soon, so that much is copied at a time, and little when blocks are needed."""
        pool = self._manager.pool
        if not self._num_cold or pool.num_allocated - self._num_allocated < _COLD_PART * self._num_cold:
            return
        self._num_allocated = pool.num_allocated
        for tier in self._tiers:
            if offered := self._offered(pool.cold(tier.num_cold)):
                self._ops += tier.store_ahead(list(offered.values()), list(offered))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        for tier in self._tiers:
            tier.note_step(num_tokens, seconds)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the numbers of all tiers."""
        for tier in self._tiers:
            tier.add_stats(stats)

    def holders(self) -> Iterable[tuple[Request, list[KVCacheBlock]]]:
        """The requests that wait for blocks, with those that they hold."""
        return [(load.request, load.blocks) for load in self._loads.values()]

    def check_integrity(self) -> None:
        """Raise AssertionError if loads, blocks and statuses disagree."""
        for tier in self._tiers:
            tier.check_integrity()
        under_way = [copy for load in self._loads.values() for copy in load.copies]
        assert sorted(self._arriving) == sorted(name for copy in under_way for name in copy.names), "contents arrive for nobody"
        for load in self._loads.values():
            assert load.request.status is RequestStatus.WAITING_FOR_BLOCKS, "a request has a load and does not wait for it"
            for block in [*(block for copy in load.copies for block in copy.blocks), *(block for block, _ in load.arrived)]:
                assert block.block_hash is None and block.ref_count == 1, f"{block} is shared before it has its content"
