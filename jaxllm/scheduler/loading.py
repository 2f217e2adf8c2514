"""Loads blocks that waiting requests need from cache tiers."""

import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_tier import NOTHING, CacheTier
from jaxllm.scheduler.keeping import Keeping
from jaxllm.scheduler.loads import Copy, Load
from jaxllm.scheduler.prefix_states import is_of_states
from jaxllm.scheduler.store_filter import StoreFilter
from jaxllm.scheduler.storing import Storing
from jaxllm.scheduler_stats import SchedulerStats

if TYPE_CHECKING:
    from jaxllm.scheduler.kv_cache_manager import KVCacheManager

_STORES_AT_ONCE = 3
"""Most stores that an otherwise idle engine begins with a plan for the sake of loads: launching more takes longer than the copies that are
under way, and the ends of copies are noticed between plans."""
_LONGEST_STEP_SECONDS = 1.0
"""More time than this between two steps, e.g. a pause or a compilation, says nothing of how long loads take."""

_TOKEN_SECONDS = 0.002
"""The longest wait for a step while a request has all that it fetches, and its first token is on its way."""


class Loading:
    """The requests with the status WAITING_FOR_BLOCKS, and the tiers that they wait for.

    A request keeps its place among those that wait, and gets the blocks of its prefix a part at a time: as many as tiers load at once, as
    are free, and as may be evicted without a loss. What arrives is in the prefix cache. Once the load is over, its admission finds it
    there; what has not arrived is computed.
    """

    def __init__(
        self,
        manager: "KVCacheManager",
        tiers: Sequence[CacheTier],
        store_filter: StoreFilter | None = None,
        *,
        stores_cold: bool = True,
        stores_computed: bool = False,
    ):
        """tiers: none if blocks are in the pool alone; then nothing is loaded. store_filter: see Storing. stores_cold: whether tiers are
        offered what leaves the pool, in addition to what they keep for other engines. stores_computed: see Storing."""
        self._manager, self._tiers = manager, tiers
        self._storing = Storing(manager.pool, tiers if stores_cold else (), store_filter, stores_computed=stores_computed)
        self.keeping = Keeping(manager, tiers)
        """For engines that continue prompts of this one."""
        self._loads: dict[str, Load] = {}
        """Loads by request, in the order of their beginning."""
        self._arriving: set[bytes] = set()
        """Names of contents that a load brings."""
        self._ops: list[AnyDeviceOp] = []
        """Operations of the step that is being planned."""
        self._load_blocks = min((tier.load_blocks for tier in tiers), default=0)
        self._store_blocks = _STORES_AT_ONCE * min((tier.copy_blocks for tier in tiers), default=0)
        self._others_run = self._awaits_stores = False
        """Whether requests run, and whether a load lately took fewer blocks than it could, because contents were not stored yet."""
        self._patience_seconds = max((tier.patience_seconds for tier in tiers), default=0.0)
        self._keeps_waiting = False
        """Whether a request waits, as far as the latest plan got."""
        self._seconds = 0.0
        """Time in which steps were planned, one shortly after the other."""
        self._step_at = time.monotonic()

    @property
    def tiers(self) -> Sequence[CacheTier]:
        return self._tiers

    @property
    def has_tiers(self) -> bool:
        return bool(self._tiers)

    # Steps

    def begin_step(self, step_id: int, done_step_id: int, *, others_run: bool = False) -> None:
        """A step is about to be planned: process what has arrived. others_run: whether any request runs."""
        now = time.monotonic()
        self._seconds += min(now - self._step_at, _LONGEST_STEP_SECONDS)
        self._step_at = now
        self._others_run = others_run
        self._ops = []
        self._keeps_waiting = False
        for tier in self._tiers:
            found = tier.begin_step(step_id, done_step_id)
            if found is not NOTHING:
                self._ops += found.ops
                self._end_loaded(tier, found.loaded)
        if self._loads:
            self._end_late()
        # Where nothing else needs blocks, loads store what they evict themselves, and are not held up by more.
        self._ops += self._storing.begin_step(stores_cold=others_run or not self._loads, others_run=others_run)

    def _end_loaded(self, tier: CacheTier, loaded: Iterable[tuple[int, Sequence[bool]]]) -> None:
        copies = {copy.load_id: (load, copy) for load in self._loads.values() for copy in load.copies if copy.tier is tier}
        for load_id, is_right in loaded:
            self._end_copy(*copies[load_id], is_right)

    def _end_late(self) -> None:
        """Give up what takes too long."""
        for load in self._loads.values():
            for copy in list(load.copies):
                if self._seconds >= copy.deadline:
                    copy.tier.cancel(copy.load_id)
                    self._end_copy(load, copy, [False] * len(copy.blocks))
            if load.left and not load.copies and self._seconds >= load.deadline:
                load.request.loads_blocks = False
                load.stop()

    def take_ops(self) -> list[AnyDeviceOp]:
        """Take the operations for tiers in the step that is being planned, once it is."""
        if not self._tiers:
            return []
        self._ops += self._storing.end_step()
        if self._loads:
            self._ops += [op for tier in self._tiers for op in tier.end_step()]
        ops, self._ops = self._ops, []
        return ops

    def _end_copy(self, load: Load, copy: Copy, is_right: Iterable[bool]) -> None:
        load.copies.remove(copy)
        load.deadline = self._seconds + self._patience_seconds
        self._arriving.difference_update(copy.names)
        request = load.request
        all_blocks = zip(copy.blocks, copy.names, copy.sources, is_right, strict=True)
        arrived = [(block, name, source) for block, name, source, right in all_blocks if right]
        if len(arrived) < len(copy.blocks):
            request.loads_blocks = False
            load.stop()
        for source, count in Counter(source for _, name, source in arrived if not is_of_states(name)).items():
            request.num_loaded_blocks[source] = request.num_loaded_blocks.get(source, 0) + count
        self._manager.publish_loaded(request, ((block, name) for block, name, _ in arrived))

    # Loads

    @property
    def num_blocks_to_come(self) -> int:
        """Most blocks that the loads under way will take. Those that another engine has yet to compute contents for reserve none."""
        return sum(len(load.left) for load in self._loads.values() if not load.is_awaiting)

    def begin(self, request: Request, num_cached_tokens: int, num_reserved_blocks: int) -> bool:
        """Begin to load blocks of a request behind a cached prefix, if tiers have them, that is faster than to compute them, and there are
        free blocks for all of it in addition to the reserved ones. Returns whether it must wait: also without a load, if there are too few
        blocks and another engine computes it meanwhile, or if that engine draws its first token."""
        must_wait = self._begins(request, num_cached_tokens, num_reserved_blocks) or request.awaits_first_token
        self._keeps_waiting |= must_wait
        return must_wait

    def _begins(self, request: Request, num_cached_tokens: int, num_reserved_blocks: int) -> bool:
        manager, pool = self._manager, self._manager.pool
        if not self._tiers or not request.loads_blocks or not manager.reads_cache(request):
            return False
        names = self._names_worth_loading(request, num_cached_tokens)
        if not names:
            return False
        found = pool.find_all(names)
        while self._num_needed(request, names, found.values()) > pool.num_free_blocks - num_reserved_blocks:
            if self._awaited(names):
                return True
            if not self._end_awaiting():
                return False
        pool.touch(found.values())
        left = [name for name in names if name not in found]
        load = Load(request, names, left, self._seconds + self._patience_seconds, found)
        if request.num_cached_before_load is None:
            request.num_cached_before_load = num_cached_tokens
        self._loads[request.request_id] = load
        request.status = RequestStatus.WAITING_FOR_BLOCKS
        self._go_on(load, pool.num_free_blocks - num_reserved_blocks)
        return True

    def _num_needed(self, request: Request, names: Sequence[bytes], found: Iterable[KVCacheBlock]) -> int:
        """Free blocks that a request takes with these contents, of which the pool has some."""
        num_shared = sum(block.ref_count > 0 for block in found)
        return max(len(names), self._manager.num_blocks_for(request.num_tokens)) - num_shared

    def _names_worth_loading(self, request: Request, num_cached_tokens: int) -> list[bytes]:
        """The names of the longest prefix that is cached, arrives, is computed by another engine, or can be loaded in less time than it
        takes to compute it; none if that is no longer than what is cached."""
        absent = self._manager.absent_names(request, self._num_loadable_blocks(request, num_cached_tokens))
        tier_of, coming = self._find(absent), self._arriving.intersection(absent) | self._awaited(absent)
        while loadable := tier_of.keys() | coming:
            names, num_tokens = self._manager.names_of_prefix(request, loadable)
            num_more = num_tokens - num_cached_tokens
            if num_more <= 0:
                break
            of_tiers = {name: tier_of[name] for name in names if name in tier_of}
            chosen: dict[bytes, CacheTier] = {}
            for tier in self._tiers:
                if part := [name for name, owner in of_tiers.items() if owner is tier]:
                    chosen |= dict.fromkeys(tier.choose(part, num_more), tier)
            if len(chosen) == len(of_tiers):
                return names
            tier_of = chosen
        return []

    def _num_loadable_blocks(self, request: Request, num_cached_tokens: int) -> int | None:
        """The first so many blocks of a request may be loaded; None: all."""
        most = request.options.max_load_tokens
        if most is None:
            return None
        # Earlier loads of the request count.
        num_found = num_cached_tokens if request.num_cached_before_load is None else request.num_cached_before_load
        return (num_found + most) // self._manager.block_size

    def _find(self, names: Sequence[bytes]) -> dict[bytes, CacheTier]:
        """The first tier that has each of these contents, of those which the pool does not have and that do not arrive."""
        tier_of: dict[bytes, CacheTier] = {}
        for tier in self._tiers:
            wanted = [name for name in names if name not in tier_of and name not in self._arriving]
            tier_of.update(dict.fromkeys(tier.match(wanted), tier))
        return tier_of

    def _awaited(self, names: Sequence[bytes]) -> set[bytes]:
        """The contents among these that another engine still computes."""
        return {name for tier in self._tiers for name in tier.awaited(names)}

    def go_on(self, num_reserved_blocks: int, *, others_run: bool) -> None:
        """Load further blocks, those of earlier loads first. The reserved blocks stay free. others_run: whether requests run, which will
        free blocks."""
        pool = self._manager.pool
        first = next((load for load in self._loads.values() if not load.is_awaiting), None)
        if first is not None and first.left and not first.copies and not others_run:
            while pool.num_free_blocks <= num_reserved_blocks and self.end_latest(but=(first.request,)):
                pass
            if pool.num_free_blocks <= num_reserved_blocks:
                first.stop()
        for load in self._loads.values():
            self._go_on(load, pool.num_free_blocks - num_reserved_blocks)
            num_reserved_blocks += 0 if load.is_awaiting else len(load.left)

    def _go_on(self, load: Load, num_spare: int) -> None:
        """Take the next blocks of a load, at most `num_spare` free ones: those that the pool has by now, and those that a tier loads."""
        pool, most = self._manager.pool, self._load_blocks - len(self._arriving)
        load.is_awaiting = bool(self._awaited(load.left[:1]))
        if not load.left or load.is_awaiting or min(most, num_spare) <= 0:
            load.deadline = self._seconds + self._patience_seconds
            return
        if self._awaits_stores and not self._others_run:
            if not any(tier.can_store for tier in self._tiers):
                return  # nothing has changed
            most = min(most, self._store_blocks)  # no more will be stored: to look for them takes time
        awaited = self._awaited(load.left)
        wanted: list[bytes] = []
        position = 0
        while position < len(load.left) and len(wanted) < min(most, num_spare):
            name = load.left[position]
            if name in self._arriving or name in awaited:
                break
            if (block := pool.find(name)) is None:
                wanted.append(name)
            else:
                num_spare -= block.ref_count == 0
                pool.touch((block,))
                load.held[name] = block
            position += 1
        num_evictable = self._num_evictable(len(wanted))
        self._awaits_stores = num_evictable < len(wanted)
        taken, rest = wanted[:num_evictable], [*wanted[num_evictable:], *load.left[position:]]
        # Only now: what was stored for it may have taken the place of what it wants.
        tier_of = self._find(taken)
        num_there = next((index for index, name in enumerate(taken) if name not in tier_of), len(taken))
        if len(rest) < len(load.left):
            load.deadline = self._seconds + self._patience_seconds
        load.left = rest if num_there == len(taken) else []
        self._load(load, taken[:num_there], tier_of)

    def _load(self, load: Load, names: Sequence[bytes], tier_of: dict[bytes, CacheTier]) -> None:
        if not names:
            return
        blocks = dict(zip(names, self._manager.pool.allocate(len(names)), strict=True))
        for tier in self._tiers:
            of_tier = [name for name in names if tier_of[name] is tier]
            for start in range(0, len(of_tier), tier.copy_blocks):
                part = of_tier[start : start + tier.copy_blocks]
                own = [blocks[name] for name in part]
                sources = tier.sources(part)
                load_id = tier.load([block.block_id for block in own], part)
                load.copies.append(Copy(tier, load_id, own, part, sources, self._seconds + tier.patience_seconds))
        load.held |= blocks
        self._arriving.update(names)

    def _num_evictable(self, count: int) -> int:
        """How many of the next `count` free blocks can be taken with no loss: tiers have their contents, or store them in this step."""
        if not count:
            return 0
        blocks = self._manager.pool.next_free(count)
        if not self._storing.unstored(blocks):
            return count
        self._ops += self._storing.store_ahead(count if self._others_run else min(count, self._store_blocks))
        lost = self._storing.unstored(blocks)
        return next((index for index, block in enumerate(blocks) if block.block_hash in lost), count)

    def is_under_way(self, request: Request) -> bool:
        """Whether the request must go on waiting."""
        load = self._loads.get(request.request_id)
        return load is not None and bool(load.copies or load.left or request.awaits_first_token)

    def end(self, request: Request) -> None:
        """Let a request go on without its load, if it has one. What has arrived is found in the prefix cache."""
        load = self._loads.pop(request.request_id, None)
        if load is None:
            return
        for copy in load.copies:
            copy.tier.cancel(copy.load_id)
            self._arriving.difference_update(copy.names)
        self._manager.pool.free(load.blocks[::-1])
        request.status = request.waiting_status

    def end_latest(self, but: Container[Request] = ()) -> bool:
        """End the load that began last, because its blocks are needed, but none of these requests: first one whose further contents another
        engine still computes, whoever it is for. Returns whether there was one."""
        return self._end_awaiting() or self._end_first(
            load.request for load in reversed(self._loads.values()) if load.request not in but
        )

    def _end_awaiting(self) -> bool:
        """End the load that began last, of those that hold blocks while another engine computes more. Returns whether there was one."""
        return self._end_first(load.request for load in reversed(self._loads.values()) if load.is_awaiting and load.held)

    def _end_first(self, requests: Iterable[Request]) -> bool:
        request = next(iter(requests), None)
        if request is not None:
            self.end(request)
        return request is not None

    def wait(self, seconds: float) -> None:
        """Wait until the state of a load changes, if there is any."""
        copies = [copy for load in self._loads.values() for copy in load.copies]
        if copies:
            copies[0].tier.wait(min(seconds, max(0.0, min(copy.deadline for copy in copies) - self._seconds)))
        elif self._tiers and (self._loads or self._keeps_waiting or self.is_storing):
            is_fetched = any(load.request.awaits_first_token and not load.left for load in self._loads.values())
            self._tiers[0].wait(min(seconds, _TOKEN_SECONDS) if is_fetched else seconds)  # for stores, or for another engine

    # Stores

    def note_computed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """See Storing."""
        self._storing.note_computed(blocks)

    @property
    def is_storing(self) -> bool:
        """Whether contents are still to be stored for other engines, so that plans are needed even if there are no requests."""
        return self.keeping.is_keeping or self._storing.is_behind

    def wait_for_stores(self, num_tokens: int) -> None:
        """See CacheTier."""
        for tier in self._tiers:
            tier.wait_for_stores(num_tokens)

    def discard(self, names: Sequence[bytes]) -> None:
        """Drop contents that were computed wrongly from all tiers."""
        for tier in self._tiers:
            tier.discard(names)

    def forget(self, *, stored: bool, external: bool = False) -> None:
        """See CacheTier. No load is under way, or its requests start over."""
        for tier in self._tiers:
            tier.forget(stored=stored, external=external)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """See CacheTier."""
        for tier in self._tiers:
            tier.note_step(num_tokens, seconds)

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for blocks."""
        return bool(self._loads)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the numbers of all tiers."""
        stats.num_loading = sum(bool(load.copies or load.left) for load in self._loads.values())
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
            assert len(load.blocks) == len(load.held) and load.held.keys().isdisjoint(load.left), (
                "a block is held for another prefix"
            )
            coming = {name for copy in load.copies for name in copy.names}
            for name in coming:
                block = load.held[name]
                assert block.block_hash is None and block.ref_count == 1, f"{block} is shared before it has its content"
