"""The schedulers of lanes as one: each request belongs to one of them, from its admission on always to the same. Does not import JAX."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from jaxllm.cache_events import CacheEvents
from jaxllm.config import ParallelOptions
from jaxllm.errors import InvalidRequestError
from jaxllm.lanes_plan import LanesPlan
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.routing.balancer import Balancer, RoutingPolicy
from jaxllm.scheduler.errors import UpdateError
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.totals import draft_stats
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput
from jaxllm.scheduler_stats import SchedulerStats, total

MAX_LOOKED_AT = 64
"""Waiting requests of a lane that are looked at in a step, to find one for another lane."""


class Requests(Mapping[str, Request]):
    """The unfinished requests of all lanes by id, in the order of arrival."""

    def __init__(self, lanes: Sequence[Scheduler]):
        self._lanes = lanes
        self._lane_of: dict[str, int] = {}
        """Of requests that may have ended."""

    def note(self, request_id: str, lane: int) -> None:
        """A request was added to a lane."""
        self._lane_of.pop(request_id, None)
        self._lane_of[request_id] = lane
        if len(self._lane_of) > 2 * len(self) + 64:
            self._lane_of = {name: lane for name, lane in self._lane_of.items() if name in self._lanes[lane].requests}

    def note_move(self, request_id: str, lane: int) -> None:
        """A request is in another lane now."""
        self._lane_of[request_id] = lane

    def __getitem__(self, request_id: str) -> Request:
        return self._lanes[self._lane_of[request_id]].requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return (name for name, lane in self._lane_of.items() if name in self._lanes[lane].requests)

    def __len__(self) -> int:
        return sum(len(lane.requests) for lane in self._lanes)


class LanesScheduler:
    """`Scheduler`'s methods, each for all lanes. Limits of requests, tokens and queues are those of a lane."""

    num_stages = 1

    def __init__(self, new_lane: Callable[[], Scheduler], num_lanes: int, policy: RoutingPolicy = "cache_aware"):
        """new_lane: gives all lanes the same draft control, if any. policy: how the lane of a request is chosen."""
        self.lanes = tuple(new_lane() for _ in range(num_lanes))
        self.drafts = self.lanes[0].drafts
        """Of all lanes: it learns from each, and all may have as many drafts in a step, because they run the same program."""
        assert all(lane.drafts is self.drafts for lane in self.lanes), "lanes have draft controls of their own"
        self.requests = Requests(self.lanes)
        self._step_id = 0
        first = self.lanes[0]
        block_size = first.cache_manager.block_size
        self._balancer = Balancer(num_lanes, block_size=block_size, max_num_seqs=first.max_num_seqs, policy=policy)
        for index in range(num_lanes):
            self._balancer.set_up(index)

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Add a request to the queue of the lane that its `data_parallel_rank` names, or of the one that serves it soonest.

        Raises as `Scheduler.add_request`.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        for index, lane in enumerate(self.lanes):
            self._balancer.note_load(index, lane.stats())
        cached = np.array([lane.num_cached_tokens(request) for lane in self.lanes])
        index = self._balancer.choose_by_cached(
            request.request_id,
            request.num_prompt_tokens,
            cached,
            request.options.data_parallel_rank,
            request.options.session_id,
        )
        self._balancer.ended(request.request_id)  # from here on the lane itself reports it
        self.lanes[index].add_request(request)
        self.requests.note(request.request_id, index)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> list[str]:
        """See Scheduler, as for all that follow."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return [*chain.from_iterable(lane.finish_requests(ids, status) for lane in self.lanes)]

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        ids = list(request_ids)
        return [*chain.from_iterable(lane.abort_requests(ids) for lane in self.lanes)]

    def fail_requests(self, request_ids: Iterable[str], kind: ErrorKind, message: str) -> list[EngineCoreOutput]:
        ids = list(request_ids)
        return [*chain.from_iterable(lane.fail_requests(ids, kind, message) for lane in self.lanes)]

    def hold_requests(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for lane in self.lanes:
            lane.hold_requests(ids)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for lane in self.lanes:
            lane.release_requests(ids)

    def fail_expired(self) -> list[EngineCoreOutput]:
        return [*chain.from_iterable(lane.fail_expired() for lane in self.lanes)]

    def has_requests(self) -> bool:
        return any(lane.has_requests() for lane in self.lanes)

    @property
    def finished_ids(self) -> list[str]:
        return [*chain.from_iterable(lane.finished_ids for lane in self.lanes)]

    # Steps

    def schedule(self, *, masked_wait: bool = False) -> LanesPlan:
        """Plan the next step of every lane; those without work have an empty one."""
        self._even_out()
        self._step_id += 1
        most = 0 if self.drafts is None else self.drafts.most(max(lane.num_contenders for lane in self.lanes))
        plans = [lane.schedule(masked_wait=masked_wait, most_drafts=most) for lane in self.lanes]
        return LanesPlan.of(plans, self._step_id)

    def _even_out(self) -> None:
        """Move requests that did not fit into the latest step of their lane to lanes where none waits: which lane ends its requests first
        was not known when they came."""
        for index, lane in enumerate(self.lanes):
            budget = 0 if lane.waiting else lane.max_num_batched_tokens
            while budget > 0:
                fullest = max(self.lanes, key=lambda other: other.num_left_waiting)
                request = _first_to_move(fullest, lane)
                if request is None:
                    break
                fullest.hand_over(request, lane)
                self.requests.note_move(request.request_id, index)
                budget -= request.num_prompt_tokens

    def tokens_are_known(self, plan: SchedulerOutput) -> bool:
        return all(lane.tokens_are_known(part) for lane, part in self._parts(plan))

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for lane, part in self._parts(plan):
            try:
                outputs += lane.update_from_output(part, result)
            except UpdateError as error:
                raise UpdateError(outputs + error.outputs) from error.__cause__
        return outputs

    def note_seconds(self, plan: SchedulerOutput, seconds: float) -> None:
        """Steps take as long as the lane with the most requests needs."""
        if self.drafts is not None and plan.rows and plan.num_tokens == sum(1 + row.num_drafts for row in plan.rows):
            self.drafts.note_seconds(max(len(part.rows) for _, part in self._parts(plan)), plan.num_drafts, seconds)

    def wait_for_blocks(self, seconds: float) -> None:
        for lane in self.lanes:
            lane.wait_for_blocks(seconds / len(self.lanes))

    def _parts(self, plan: SchedulerOutput) -> Iterable[tuple[Scheduler, SchedulerOutput]]:
        assert isinstance(plan, LanesPlan), "a plan of one lane"
        return zip(self.lanes, plan.lanes, strict=True)

    # Operations on the whole state

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if not reset_running_requests and any(lane.holds_blocks for lane in self.lanes):
            return False
        answers = [lane.reset_prefix_cache(reset_running_requests) for lane in self.lanes]
        return all(answers)

    @property
    def holds_blocks(self) -> bool:
        return any(lane.holds_blocks for lane in self.lanes)

    def publish_cache_events(self) -> None:
        """Nothing: events tell replicas apart, and an engine with lanes is never one of several."""

    def take_cache_events(self) -> CacheEvents | None:
        return None

    def cache_snapshot(self) -> CacheEvents:
        return CacheEvents(cleared=True, stored=b"".join(lane.cache_snapshot().stored for lane in self.lanes))

    def start_over(self) -> None:
        for lane in self.lanes:
            lane.start_over()

    def limit_steps(self, divisor: int) -> None:
        for lane in self.lanes:
            lane.limit_steps(divisor)

    @property
    def num_queued_tokens(self) -> int:
        return sum(lane.num_queued_tokens for lane in self.lanes)

    def stats(self) -> SchedulerStats:
        """The numbers of all lanes together."""
        found = total([lane.stats() for lane in self.lanes])
        return found if self.drafts is None else replace(found, **draft_stats(self.drafts))  # each lane told those of all

    def check_integrity(self) -> None:
        """Raise AssertionError if a lane's state is inconsistent, or a request is in two lanes or in none."""
        for lane in self.lanes:
            lane.check_integrity()
        ids = [*chain.from_iterable(lane.requests for lane in self.lanes)]
        assert sorted(ids) == sorted(self.requests), "a request is in two lanes or in none"


def _first_to_move(lane: Scheduler, other: Scheduler) -> Request | None:
    """The first of a lane's waiting requests that another lane has room for, if any did not fit here."""
    if not lane.num_left_waiting:
        return None
    first = islice(lane.waiting, MAX_LOOKED_AT)
    waiting = (request for request in first if request.options.data_parallel_rank is None)
    return next((each for each in waiting if each.status is RequestStatus.WAITING and other.has_room_for(each)), None)


def lanes_scheduler(new_lane: Callable[[], Scheduler], parallel: ParallelOptions) -> LanesScheduler:
    """The scheduler of an engine with lanes, each with one of its own."""
    return LanesScheduler(new_lane, parallel.num_lanes, parallel.data_parallel_routing)
