"""Rooms: what requests need in addition to blocks. Here a room has seats for two kinds of requests, as for two adapters."""

from collections import Counter

import pytest

from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler.errors import PlanError
from jaxllm.scheduler.scheduler import Scheduler
from tests.helpers.scheduling import make_request, make_scheduler, result_of, run_to_end, step


class Seats:
    """The kind of a request is the first letter of its id."""

    def __init__(self, when_full: Fit) -> None:
        self.when_full = when_full
        self.holders: dict[str, str] = {}

    def fits(self, request: Request) -> Fit:
        kinds = set(self.holders.values())
        return Fit.NOW if request.request_id[0] in kinds or len(kinds) < 2 else self.when_full

    def take(self, request: Request) -> None:
        assert request.request_id not in self.holders
        self.holders[request.request_id] = request.request_id[0]

    def release(self, request: Request) -> None:
        self.holders.pop(request.request_id, None)


def make(*names: str, when_full: Fit = Fit.LATER, **options: object) -> tuple[Scheduler, Seats]:
    seats = Seats(when_full)
    scheduler = make_scheduler(rooms=(seats,), **options)
    for name in names:
        scheduler.add_request(make_request(name, 4, max_tokens=3))
    return scheduler, seats


def running(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


@pytest.mark.parametrize(
    ("when_full", "first", "then"),
    [(Fit.LATER, ["a1", "b1", "a2", "b2"], ["c1", "c2"]), (Fit.IN_TURN, ["a1", "b1"], ["c1", "a2", "c2"])],
)
def test_a_request_without_room_waits_and_those_behind_it_overtake_it_or_wait_too(
    when_full: Fit, first: list[str], then: list[str]
) -> None:
    scheduler, seats = make("a1", "b1", "c1", "a2", "c2", "b2", when_full=when_full)
    step(scheduler)
    assert running(scheduler) == list(seats.holders) == first
    while "a1" in running(scheduler):
        step(scheduler)
    step(scheduler)
    assert running(scheduler) == list(seats.holders) == then
    run_to_end(scheduler)
    assert not seats.holders


def test_those_that_were_overtaken_keep_their_order() -> None:
    scheduler, _ = make("a", "b", "c2", "d", "c1", "a2")
    step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == ["c2", "d", "c1"]


@pytest.mark.parametrize("end", ["abort", "failure", "start over", "preemption"])
def test_room_is_released_however_a_request_leaves_it(end: str) -> None:
    scheduler, seats = make("a", "b", "c")
    step(scheduler)
    assert set(seats.holders) == {"a", "b"}
    if end == "abort":
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    elif end == "failure":
        scheduler.fail_requests(["a"], ErrorKind.INTERNAL, "a fault")
    elif end == "start over":
        scheduler.start_over()
        assert not seats.holders
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert not seats.holders
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert set(seats.holders) == {"b", "c"} == set(running(scheduler))
    run_to_end(scheduler)
    assert not seats.holders


def test_a_request_takes_nothing_while_blocks_are_missing_and_releases_before_it_is_admitted_again() -> None:
    scheduler, seats = make(num_blocks=5, block_size=4, max_model_len=16, caching=False)
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, 7, max_tokens=6))
    taken: Counter[str] = Counter()
    take = seats.take
    seats.take = lambda request: (taken.update([request.request_id]), take(request))[1]  # type: ignore[method-assign]
    while scheduler.has_requests():
        plan = scheduler.schedule()
        assert set(seats.holders) == set(running(scheduler))
        scheduler.update_from_output(plan, result_of(scheduler, plan))
        assert set(seats.holders) == set(running(scheduler))
    assert set(taken) == {"a", "b", "c"} and taken.total() > 3  # some were preempted


def test_a_room_that_fails_ends_the_request_alone() -> None:
    scheduler, seats = make("a", "b")

    def fail(request: Request) -> None:
        if request.request_id == "b":
            raise ValueError("a fault")

    seats.take = fail  # type: ignore[method-assign]
    with pytest.raises(PlanError) as held:
        scheduler.schedule()
    assert held.value.request_id == "b"
    scheduler.start_over()
    scheduler.fail_requests(["b"], ErrorKind.INTERNAL, "a fault")
    run_to_end(scheduler)
