"""The schedulers of data-parallel ranks as one. Each request belongs to one of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from jaxllm.cache_events import CacheEvents
from jaxllm.config import ParallelOptions
from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import EngineCoreOutput
from jaxllm.ranks_plan import RanksPlan
from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.routing.balancer import Balancer, RoutingPolicy
from jaxllm.scheduler.errors import UpdateError
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.totals import draft_stats
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput
from jaxllm.scheduler_stats import SchedulerStats, total

MAX_LOOKED_AT = 64
"""Waiting requests of a rank that are looked at in a step, to find one for another rank."""


class Requests(Mapping[str, Request]):
    """The unfinished requests of all ranks by id, in the order of arrival."""

    def __init__(self, ranks: Sequence[Scheduler]):
        self._ranks = ranks
        self._rank_of: dict[str, int] = {}
        """Ids of requests that may have ended."""

    def note(self, request_id: str, rank: int) -> None:
        """A request was added to a rank."""
        self._rank_of.pop(request_id, None)
        self._rank_of[request_id] = rank
        if len(self._rank_of) > 2 * len(self) + 64:
            self._rank_of = {name: rank for name, rank in self._rank_of.items() if name in self._ranks[rank].requests}

    def note_move(self, request_id: str, rank: int) -> None:
        """A request is in another rank now."""
        self._rank_of[request_id] = rank

    def __getitem__(self, request_id: str) -> Request:
        return self._ranks[self._rank_of[request_id]].requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return (name for name, rank in self._rank_of.items() if name in self._ranks[rank].requests)

    def __len__(self) -> int:
        return sum(len(rank.requests) for rank in self._ranks)


class RanksScheduler:
    """`Scheduler`'s methods, each for all ranks. Limits of requests, tokens and queues are those of a rank."""

    num_stages = 1

    def __init__(self, new_rank: Callable[[], Scheduler], num_ranks: int, policy: RoutingPolicy = "cache_aware"):
        """new_rank: gives all ranks the same draft control, if any. policy: how the rank of a request is chosen."""
        self.ranks = tuple(new_rank() for _ in range(num_ranks))
        self.drafts = self.ranks[0].drafts
        """Shared by all ranks: it learns from each, and gives all as many drafts in a step, because they run the same program."""
        assert all(rank.drafts is self.drafts for rank in self.ranks), "ranks have draft controls of their own"
        self.requests = Requests(self.ranks)
        self._step_id = 0
        first = self.ranks[0]
        block_size = first.cache_manager.block_size
        self._balancer = Balancer(num_ranks, block_size=block_size, max_num_seqs=first.limits.max_num_seqs, policy=policy)
        for index in range(num_ranks):
            self._balancer.set_up(index)

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Add a request to the queue of the rank that its `data_parallel_rank` names, or of the one that serves it soonest.

        Raises as `Scheduler.add_request`.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        for index, rank in enumerate(self.ranks):
            self._balancer.note_load(index, rank.stats())
        cached = np.array([rank.num_cached_tokens(request) for rank in self.ranks])
        index = self._balancer.choose_by_cached(
            request.request_id,
            request.num_prompt_tokens,
            cached,
            request.options.data_parallel_rank,
            request.options.session_id,
        )
        self._balancer.ended(request.request_id)  # from here on the rank itself reports it
        self.ranks[index].add_request(request)
        self.requests.note(request.request_id, index)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> list[str]:
        """See Scheduler, as for all that follow."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return [*chain.from_iterable(rank.finish_requests(ids, status) for rank in self.ranks)]

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        ids = list(request_ids)
        return [*chain.from_iterable(rank.abort_requests(ids) for rank in self.ranks)]

    def fail_requests(self, request_ids: Iterable[str], kind: ErrorKind, message: str) -> list[EngineCoreOutput]:
        ids = list(request_ids)
        return [*chain.from_iterable(rank.fail_requests(ids, kind, message) for rank in self.ranks)]

    def hold_requests(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for rank in self.ranks:
            rank.hold_requests(ids)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for rank in self.ranks:
            rank.release_requests(ids)

    def fail_expired(self) -> list[EngineCoreOutput]:
        return [*chain.from_iterable(rank.fail_expired() for rank in self.ranks)]

    def has_requests(self) -> bool:
        return any(rank.has_requests() for rank in self.ranks)

    @property
    def finished_ids(self) -> list[str]:
        return [*chain.from_iterable(rank.finished_ids for rank in self.ranks)]

    # Steps

    def schedule(self, *, masked_wait: bool = False) -> RanksPlan:
        """Plan the next step of every rank; those without work have an empty one."""
        self._even_out()
        self._step_id += 1
        most = 0 if self.drafts is None else self.drafts.most(max(rank.num_contenders for rank in self.ranks))
        decodes = any(rank.decodes for rank in self.ranks)
        plans = [rank.schedule(masked_wait=masked_wait, most_drafts=most, others_decode=decodes) for rank in self.ranks]
        return RanksPlan.of(plans, self._step_id)

    def _even_out(self) -> None:
        """Move requests that did not fit into the latest step of their rank to ranks where none waits: which rank ends its requests first
        was not known when they came."""
        for index, rank in enumerate(self.ranks):
            budget = 0 if rank.waiting else rank.limits.max_num_batched_tokens
            while budget > 0:
                fullest = max(self.ranks, key=lambda other: other.num_left_waiting)
                request = _first_to_move(fullest, rank)
                if request is None:
                    break
                fullest.hand_over(request, rank)
                self.requests.note_move(request.request_id, index)
                budget -= request.num_prompt_tokens

    def tokens_are_known(self, plan: SchedulerOutput) -> bool:
        return all(rank.tokens_are_known(part) for rank, part in self._parts(plan))

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for rank, part in self._parts(plan):
            try:
                outputs += rank.update_from_output(part, result)
            except UpdateError as error:
                raise UpdateError(outputs + error.outputs) from error.__cause__
        return outputs

    def note_seconds(self, plan: SchedulerOutput, seconds: float) -> None:
        """Steps take as long as the rank with the most requests needs."""
        if self.drafts is not None and plan.rows and plan.num_tokens == sum(1 + row.num_drafts for row in plan.rows):
            self.drafts.note_seconds(max(len(part.rows) for _, part in self._parts(plan)), plan.num_drafts, seconds)

    def wait_for_blocks(self, seconds: float) -> None:
        for rank in self.ranks:
            rank.wait_for_blocks(seconds / len(self.ranks))

    def wait_for_stores(self, num_tokens: int) -> None:
        for rank in self.ranks:
            rank.wait_for_stores(num_tokens // len(self.ranks))

    def _parts(self, plan: SchedulerOutput) -> Iterable[tuple[Scheduler, SchedulerOutput]]:
        assert isinstance(plan, RanksPlan), "a plan of one rank"
        return zip(self.ranks, plan.ranks, strict=True)

    # Operations on the whole state

    def discard(self, names: Sequence[bytes]) -> None:
        for rank in self.ranks:
            rank.discard(names)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        if not reset_running_requests and any(rank.holds_blocks for rank in self.ranks):
            return False
        answers = [rank.reset_prefix_cache(reset_running_requests, reset_external) for rank in self.ranks]
        return all(answers)

    @property
    def holds_blocks(self) -> bool:
        return any(rank.holds_blocks for rank in self.ranks)

    def publish_cache_events(self) -> None:
        """Nothing: events tell replicas apart, and an engine with ranks is never one of several."""

    def take_cache_events(self) -> CacheEvents | None:
        return None

    def cache_snapshot(self) -> CacheEvents:
        return CacheEvents(cleared=True, stored=b"".join(rank.cache_snapshot().stored for rank in self.ranks))

    def start_over(self) -> None:
        for rank in self.ranks:
            rank.start_over()

    def limit_steps(self, divisor: int) -> None:
        for rank in self.ranks:
            rank.limit_steps(divisor)

    def limit_tokens(self, most: int | None) -> None:
        for rank in self.ranks:
            rank.limit_tokens(most)

    @property
    def num_queued_tokens(self) -> int:
        return sum(rank.num_queued_tokens for rank in self.ranks)

    def stats(self) -> SchedulerStats:
        """The numbers of all ranks together."""
        found = total([rank.stats() for rank in self.ranks])
        return found if self.drafts is None else replace(found, **draft_stats(self.drafts))  # each rank told those of all

    def check_integrity(self) -> None:
        """Raise AssertionError if a rank's state is inconsistent, or a request is in two ranks or in none."""
        for rank in self.ranks:
            rank.check_integrity()
        ids = [*chain.from_iterable(rank.requests for rank in self.ranks)]
        assert sorted(ids) == sorted(self.requests), "a request is in two ranks or in none"


def _first_to_move(rank: Scheduler, other: Scheduler) -> Request | None:
    """The first of a rank's waiting requests that another rank has room for, if any did not fit here."""
    if not rank.num_left_waiting:
        return None
    first = islice(rank.waiting, MAX_LOOKED_AT)
    waiting = (each for each in first if each.options.data_parallel_rank is None and not rank.computes_for(each))
    return next((each for each in waiting if each.status is RequestStatus.WAITING and other.has_room_for(each)), None)


def ranks_scheduler(new_rank: Callable[[], Scheduler], parallel: ParallelOptions) -> RanksScheduler:
    """The scheduler of an engine with ranks: one for each rank."""
    return RanksScheduler(new_rank, parallel.num_ranks, parallel.data_parallel_routing)
