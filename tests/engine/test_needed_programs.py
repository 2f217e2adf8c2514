"""Requests wait for programs in no step's way: others overtake them, an error ends only them, and steps stay small where they must."""

import time
from concurrent.futures import Future
from typing import Any

import pytest

from jaxllm.engine.needed_programs import NeededPrograms
from jaxllm.errors import OverloadedError
from jaxllm.foreseen import NOTHING_AWAITED, Foreseen, Needs, StepLimit
from jaxllm.request import ErrorKind, FinishReason, Request, RequestStatus
from jaxllm.scheduler.scheduler import Scheduler
from tests.helpers import engines
from tests.helpers.scheduling import make_request, make_scheduler, step


class Executor:
    """Foresees what the test says."""

    def __init__(self) -> None:
        self.foreseen = NOTHING_AWAITED

    def foresee(self, needs: Needs) -> Foreseen:
        return self.foreseen


class Engine:
    """A scheduler whose requests may need the programs "a" and "b"."""

    def __init__(self, **options: Any) -> None:
        self.executor = Executor()
        self.needed = NeededPrograms(self.executor)  # type: ignore[arg-type]
        self.scheduler: Scheduler = make_scheduler(rooms=(self.needed,), max_num_batched_tokens=64, max_num_seqs=8, **options)
        self.jobs: dict[str, Future[object]] = {"a": Future(), "b": Future()}

    def add(self, name: str, *programs: str, limit: StepLimit | None = None) -> Request:
        self.executor.foreseen = Foreseen({each: self.jobs[each] for each in programs}, limit)
        request = make_request(name, 4, max_tokens=2)
        self.scheduler.add_request(request)
        self.needed.admit(request)
        return request

    def run(self) -> set[str]:
        """Ids of requests that get tokens in as many steps as a request takes."""
        return {output.request_id for _ in range(2) for output in step(self.scheduler)[1]}


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_requests_whose_programs_are_there_overtake_those_that_wait(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="jaxllm")
    both, _, a, _ = engine.add("both", "a", "b"), engine.add("first"), engine.add("a", "a"), engine.add("second")
    assert [message.partition("others run: ")[2] for message in caplog.messages] == ["a, b"], "each program is told once"
    assert not engine.needed.settle(engine.scheduler)
    assert engine.run() == {"first", "second"}
    assert engine.needed.num_waiting == 2 and not engine.scheduler.holds_blocks
    engine.jobs["a"].set_result("program")
    engine.needed.settle(engine.scheduler)
    assert engine.run() == {"a"} and a.status.is_finished
    engine.jobs["b"].set_result("program")
    engine.needed.settle(engine.scheduler)
    assert engine.needed.num_waiting == 0
    assert engine.run() == {"both"} and both.status is RequestStatus.FINISHED_LENGTH_CAPPED
    engine.needed.check_integrity()


def test_a_program_that_cannot_be_compiled_ends_all_that_wait_for_it(engine: Engine) -> None:
    engine.add("both", "a", "b"), engine.add("b", "b"), engine.add("a", "a")
    engine.jobs["b"].set_exception(ValueError("no registers in /home/me"))
    outputs = engine.needed.settle(engine.scheduler)
    assert {(output.request_id, output.finish_reason, output.error_kind) for output in outputs} == {
        (name, FinishReason.ERROR, ErrorKind.INTERNAL) for name in ("both", "b")
    }
    assert {output.stop_reason for output in outputs} == {
        "a program that the request needs cannot be compiled (b: ValueError); try again later"
    }
    assert list(engine.scheduler.requests) == ["a"] and engine.needed.num_waiting == 1


def test_a_request_that_ends_waits_no_more_and_one_that_starts_over_waits_on(engine: Engine) -> None:
    limit = StepLimit(16, engine.jobs["b"])
    engine.add("ends", "a", limit=limit), engine.add("stays", "a")
    engine.scheduler.start_over()
    engine.scheduler.finish_requests("ends", RequestStatus.FINISHED_ABORTED)
    engine.needed.settle(engine.scheduler)
    plan, _ = step(engine.scheduler)
    assert not plan.rows and engine.needed.num_waiting == 1 and engine.scheduler.limits.max_num_batched_tokens == 64
    engine.scheduler.finish_requests("stays", RequestStatus.FINISHED_ABORTED)
    engine.needed.check_integrity()


def test_steps_are_as_small_as_the_smallest_limit_until_the_program_of_large_ones_is_there(engine: Engine) -> None:
    engine.add("16", limit=StepLimit(16, engine.jobs["a"])), engine.add("32", limit=StepLimit(32, engine.jobs["b"]))
    engine.needed.settle(engine.scheduler)
    assert engine.scheduler.limits.max_num_batched_tokens == engine.scheduler.limits.max_num_prefill_tokens == 16
    engine.scheduler.limit_steps(2)
    assert engine.scheduler.limits.max_num_batched_tokens == 8, "both limits hold"
    engine.jobs["a"].set_exception(ValueError("a step tries again"))
    engine.needed.settle(engine.scheduler)
    assert engine.scheduler.limits.max_num_batched_tokens == 16
    engine.scheduler.limit_steps(1)
    engine.jobs["b"].set_result("program")
    engine.needed.settle(engine.scheduler)
    assert engine.scheduler.limits.max_num_batched_tokens == 64
    engine.scheduler.limit_tokens(3)
    assert engine.scheduler.limits.max_num_batched_tokens == 8, "a step has room for each request"


def test_one_that_waits_for_programs_does_not_count_against_those_that_find_a_place() -> None:
    engine = Engine(max_num_queued_reqs=1)
    engine.add("image", "a")
    step(engine.scheduler)
    engine.add("first"), engine.add("second")
    assert engine.run() == {"first", "second"}
    for number in range(8):
        engine.add(str(number))
    with pytest.raises(OverloadedError):
        engine.add("one too many")


def test_the_loop_rests_while_all_requests_wait_whatever_for(tiny_core, monkeypatch) -> None:
    """One for a program, one until its client reads."""
    core, job = engines.renew(tiny_core), Future[object]()
    monkeypatch.setattr(core.executor, "foresee", lambda needs: Foreseen({"a": job}))
    core.add_request(engines.request("waits", [1, 2, 3], max_tokens=2))
    monkeypatch.undo()
    core.add_request(engines.request("held", [1, 2, 3], max_tokens=2))
    core.hold_requests(["held"])
    end, num_steps = time.monotonic() + 0.1, 0
    while time.monotonic() < end:
        assert core.step() == []
        num_steps += 1
    assert num_steps < 10
    job.set_result("program")
    core.release_requests(["held"])
    assert {len(answer.tokens) for answer in engines.run(core, []).values()} == {2}
