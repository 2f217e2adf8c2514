"""Requests that exceed their time limit."""

import pytest

from jaxllm.request import ErrorKind, FinishReason
from jaxllm.scheduler.deadlines import Deadlines
from tests.helpers.scheduling import make_request, make_scheduler, run_to_end, step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("jaxllm.scheduler.scheduler.time.monotonic", lambda: now[0])
    return now


def test_a_request_that_waits_too_long_ends_with_the_reason(clock: list[float]) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("runs", 4, queue_timeout_seconds=1.0))
    scheduler.add_request(make_request("waits", 4, queue_timeout_seconds=3.0))
    step(scheduler)
    clock[0] += 2.9
    assert scheduler.fail_expired() == []
    clock[0] += 0.2
    (output,) = scheduler.fail_expired()
    assert (output.request_id, output.finish_reason, output.error_kind) == (
        "waits",
        FinishReason.ERROR,
        ErrorKind.QUEUE_TIMEOUT,
    )
    assert "waited 3 s" in str(output.stop_reason) and output.new_token_ids == []
    assert {output.request_id for output in run_to_end(scheduler)} == {"runs"}


def test_a_request_that_takes_too_long_ends_in_the_middle_and_frees_its_blocks(clock: list[float]) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 40, timeout_seconds=5.0))
    step(scheduler)
    plan = scheduler.schedule()
    clock[0] += 5.0
    (output,) = scheduler.fail_expired()
    assert output.error_kind is ErrorKind.TIMEOUT and "with 1 tokens" in str(output.stop_reason)
    assert scheduler.cache_manager.pool.usage == 0.0 and not scheduler.has_requests()
    assert plan.num_scheduled_tokens == {"a": 1}
    scheduler.check_integrity()


def test_what_a_request_computed_before_its_timeout_is_found_by_the_next(clock: list[float]) -> None:
    scheduler = make_scheduler()
    prompt = list(range(40))
    scheduler.add_request(make_request("a", prompt, timeout_seconds=5.0))
    step(scheduler)
    scheduler.schedule()
    clock[0] += 5.0
    assert [output.request_id for output in scheduler.fail_expired()] == ["a"]
    assert scheduler.num_cached_tokens(make_request("b", prompt)) == 32
    scheduler.check_integrity()


def test_a_preempted_request_does_not_wait_in_the_sense_of_the_queue_timeout(clock: list[float]) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, queue_timeout_seconds=1.0))
    step(scheduler)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    clock[0] += 2.0
    assert scheduler.fail_expired() == []


def test_a_request_beyond_both_times_ends_once(clock: list[float]) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("runs", 4))
    scheduler.add_request(make_request("a", 4, queue_timeout_seconds=1.0, timeout_seconds=2.0))
    step(scheduler)
    clock[0] += 9.0
    assert [output.error_kind for output in scheduler.fail_expired()] == [ErrorKind.QUEUE_TIMEOUT]
    assert scheduler.fail_expired() == []


def test_requests_that_ended_are_not_kept() -> None:
    scheduler = make_scheduler()
    for number in range(500):
        scheduler.add_request(make_request(str(number), 4, timeout_seconds=1000.0, max_tokens=1))
        run_to_end(scheduler)
    assert len(scheduler._deadlines) < 70


def test_requests_without_timeouts_have_no_deadlines() -> None:
    deadlines = Deadlines()
    deadlines.add(make_request("a", 4), 0.0)
    assert len(deadlines) == 0 and deadlines.expired(1e9) == []
