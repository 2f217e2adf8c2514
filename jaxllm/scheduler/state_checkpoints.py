"""Plans when the states by row of a prompt are kept, and given to the row of a request that continues behind its cached prefix."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp, LoadState, StoreState
from jaxllm.request import PromptItem, Request, RequestStatus
from jaxllm.scheduler.admission import ChunkRoom
from jaxllm.scheduler_stats import SchedulerStats

if TYPE_CHECKING:
    from jaxllm.scheduler.kv_cache_manager import CachedPrefix, KVCacheManager


@dataclass
class _Progress:
    """A request that runs or is about to be admitted."""

    latest: int
    """The last position at which it found or stored states."""
    num_matched_tokens: int
    """See CachedPrefix."""
    loads: list[int]
    """Blocks with the states that its first step begins with."""


class StateCheckpoints(ChunkRoom):
    """Ends chunks where states are kept:

    - at the end of a prompt (`PrefixStates.position`), for an equal one and for the next turn of a conversation,
    - where the blocks of an earlier prompt, but no states, go on: others are likely to begin the same way,
    - every `interval` tokens, 0: nowhere else.

    Positions too close to the states before them are left out (`PrefixStates.least_tokens`), except at the end of a prompt whose answer
    another engine computes. The blocks that hold states are free from the beginning: they are found until others take them.
    """

    def __init__(self, manager: "Callable[[], KVCacheManager]", interval: int, *, stores: bool):
        """manager: the scheduler's, which a failure replaces. stores: whether chunks may end anywhere; else states are only loaded."""
        self._manager, self._interval, self._stores = manager, interval, stores
        self._progress: dict[Request, _Progress] = {}
        self._num_stored = self._num_loaded = 0

    def begin(self, request: Request, prefix: "CachedPrefix") -> None:
        """A request is about to be admitted behind this prefix, whose states are in its blocks until the step runs."""
        self._progress[request] = _Progress(prefix.num_computed_tokens, prefix.num_matched_tokens, list(prefix.state_ids))

    def release(self, request: Request) -> None:
        """The states that it used last are of use as long as its blocks are; after an error, none that it stored is."""
        progress, manager = self._progress.pop(request, None), self._manager()
        if request.status is RequestStatus.FINISHED_ERROR:
            manager.discard_states(request)
        elif progress is not None and progress.latest:
            manager.renew_states(request, progress.latest)

    def limit(self, request: Request, start: int, count: int) -> int:
        latest = start if self._is_due(request, start) else self._progress[request].latest
        position = self._next(request, start + 1, latest)
        return count if position is None or position >= start + count else position - start

    def ops(self, request: Request, start: int, count: int) -> list[AnyDeviceOp]:
        progress, manager = self._progress[request], self._manager()
        found: list[AnyDeviceOp] = []
        if progress.loads:
            found = [LoadState(request.request_id, progress.loads)]
            progress.loads = []
            self._num_loaded += 1
            manager.renew_states(request, start)
        elif self._is_due(request, start):
            progress.latest = start
            if blocks := manager.store_states(request, start):
                found = [StoreState(request.request_id, [block.block_id for block in blocks])]
                self._num_stored += 1
        if request.is_kept_for_decode and start == manager.states.position(request):
            manager.loading.keeping.keep(manager.states.names_of(request))
        return found

    def _is_due(self, request: Request, position: int) -> bool:
        """Whether the states before this token, with which a chunk begins, are to be stored."""
        return position > 0 and self._next(request, position, self._progress[request].latest) == position

    def _next(self, request: Request, start: int, latest: int) -> int | None:
        """The first position from `start` on at which states are to be stored, if the last ones are at `latest`; None: there is none."""
        if not self._stores:
            return None
        states, items = self._manager().states, request.spec.items
        end, least = states.position(request), max(start, latest + states.least_tokens)
        wanted = [position for position in (self._progress[request].num_matched_tokens, end) if position >= least]
        if request.is_kept_for_decode and end >= start:
            wanted.append(end)
        # Some models compute an item whole: no states are kept within one.
        wanted = [position for position in wanted if not _is_in_item(items, position)]
        if self._interval:
            regular = range(-(-least // self._interval) * self._interval, end, self._interval)
            wanted += [next((position for position in regular if not _is_in_item(items, position)), end + 1)]
        return min((position for position in wanted if position <= end), default=None)

    def forget(self) -> None:
        self._progress.clear()

    def add_stats(self, stats: SchedulerStats) -> None:
        """The memory of the states that can be found."""
        manager = self._manager()
        stats.blocks_per_state, stats.num_state_blocks = manager.states.num_blocks, manager.pool.num_state_blocks
        stats.num_stored_states, stats.num_loaded_states = self._num_stored, self._num_loaded

    def check_integrity(self, requests: Collection[Request]) -> None:
        assert self._progress.keys() <= {*requests}, "states are noted of a request that has ended"


def _is_in_item(items: Iterable[PromptItem], position: int) -> bool:
    return any(item.position < position < item.end for item in items)
