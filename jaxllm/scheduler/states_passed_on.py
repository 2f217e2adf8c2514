"""Plans when the states by row of a prompt are taken, for another engine, and given to the row of a request that continues them."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp, LoadState, StoreState
from jaxllm.request import PromptItem, Request, RequestStatus
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler_stats import SchedulerStats

if TYPE_CHECKING:
    from jaxllm.scheduler.kv_cache_manager import KVCacheManager


class StatesPassedOn:
    """A ChunkRoom that ends a chunk where states are taken (`PrefixStates.position`), and begins one where they are given."""

    item_kinds: tuple[str, ...] = ()
    min_chunk = 1

    def __init__(self, manager: "Callable[[], KVCacheManager]"):
        """manager: the scheduler's, which a failure replaces."""
        self._manager = manager
        self._loads: dict[Request, Sequence[int]] = {}
        """Blocks with the states of requests that the step admits."""
        self._stored: set[Request] = set()
        """Unfinished requests whose states are in blocks."""

    def load(self, request: Request, block_ids: Sequence[int]) -> None:
        """The step that is being planned admits a request behind a prefix, whose states are in these blocks until it runs."""
        self._loads[request] = block_ids

    def check(self, item: PromptItem) -> None:
        """See ChunkRoom."""

    def fits(self, request: Request) -> Fit:
        """Always: a step takes states if there are blocks for them."""
        return Fit.NOW

    def take(self, request: Request) -> None:
        """See AdmissionRoom."""

    def release(self, request: Request) -> None:
        """See AdmissionRoom. After an error, nothing that it computed is kept, also where it comes after a preemption."""
        if request in self._stored and request.status.is_finished:
            self._stored.remove(request)
            if request.status is RequestStatus.FINISHED_ERROR:
                manager = self._manager()
                manager.discard(manager.states.names_of(request))

    def begin_step(self, *, decodes: bool) -> None:
        """See ChunkRoom."""
        self._loads.clear()

    def limit(self, request: Request, start: int, count: int) -> int:
        """See ChunkRoom."""
        position = self._manager().states.position(request)
        if not request.is_kept_for_decode or not start < position < start + count:
            return count
        # Some models compute an item whole: no states are taken within one.
        is_in_item = any(item.position < position < item.end for item in request.spec.items)
        return count if is_in_item else position - start

    def ops(self, request: Request, start: int, count: int) -> list[AnyDeviceOp]:
        """See ChunkRoom."""
        if not start or start != self._manager().states.position(request):
            return []
        if (loaded := self._loads.pop(request, None)) is not None:
            found: list[AnyDeviceOp] = [LoadState(request.request_id, list(loaded))]
        else:
            found = self._store(request) if request.is_kept_for_decode else []
        loading = self._manager().loading
        if loading is not None and request.is_kept_for_decode:
            loading.keep(self._manager().states.names_of(request))
        return found

    def _store(self, request: Request) -> list[AnyDeviceOp]:
        """Give the states blocks, in which they are found until they are evicted; without enough free ones, another engine gets nothing."""
        pool, names = self._manager().pool, self._manager().states.names_of(request)
        if all(map(pool.is_cached, names)) or len(names) > pool.num_free_blocks:
            return []
        blocks = pool.allocate(len(names))
        for block, name in zip(blocks, names, strict=True):
            pool.publish(block, name)
        pool.free(blocks[::-1])
        self._stored.add(request)
        return [StoreState(request.request_id, [block.block_id for block in blocks])]

    def step_ops(self) -> list[AnyDeviceOp]:
        """There are none."""
        return []

    def is_begun(self, request: Request) -> bool:
        """Never: items are not its concern."""
        return False

    def forget(self) -> None:
        """See ChunkRoom."""
        self._loads.clear()

    def add_stats(self, stats: SchedulerStats) -> None:
        """There are none: blocks with states are counted as others are."""

    def check_integrity(self, requests: Collection[Request]) -> None:
        """See ChunkRoom."""
        assert not self._loads, "states are loaded for a request that was not admitted"
        assert self._stored <= {*requests}, "states are noted of a request that has ended"
