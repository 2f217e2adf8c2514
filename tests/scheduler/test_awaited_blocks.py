"""Requests whose prompts another engine still computes: they hold up no others, and give back what they hold to requests that can run."""

import itertools
import random
import time
from typing import Any

import pytest

from jaxllm.request import Request, RequestStatus
from tests.helpers.fake_runner import FakeEngine
from tests.helpers.fake_tier import FakeTier
from tests.helpers.scheduling import make_request
from tests.scheduler.test_tiers import add, block_names, check_tokens, make_engine

NAMES = block_names("a")[:8]
"""The blocks of a prompt, of which another engine computes one after the other."""


class Elsewhere:
    """An engine with a tier to which another engine brings the blocks of a prompt."""

    def __init__(self, **options: Any):
        tier = FakeTier(random.Random(1), max_steps=0, load_blocks=100, share_stored=1.0)
        self.engine, self.tier = make_engine(tier, **options)
        self.scheduler = self.engine.scheduler
        self.tier.coming = {name: self.tier.contents.pop(name) for name in NAMES}
        self.num_computed = self.engine.runner.num_computed_tokens

    def bring(self, count: int) -> None:
        """So many further blocks are computed."""
        for name in list(self.tier.coming)[:count]:
            self.tier.contents[name] = self.tier.coming.pop(name)

    def step(self, count: int = 4) -> None:
        for _ in range(count):
            self.engine.dispatch()
            self.engine.collect()
            self.scheduler.check_integrity()

    def num_held(self) -> int:
        return sum(len(blocks) for _, blocks in self.scheduler.cache_manager.loading.holders())


def test_blocks_arrive_over_time_and_none_is_computed() -> None:
    elsewhere = Elsewhere()
    request = add(elsewhere.engine, "a2")
    for count in (0, 1, 3, 0, 3):
        elsewhere.bring(count)
        elsewhere.step()
        assert request.status is RequestStatus.WAITING_FOR_BLOCKS
        assert elsewhere.num_held() == 8 - len(elsewhere.tier.coming)
    elsewhere.bring(1)
    check_tokens(elsewhere.engine, request)
    assert request.num_cached_tokens == 32 and elsewhere.engine.runner.num_computed_tokens - elsewhere.num_computed == 1 + 2


@pytest.mark.parametrize("can_store", [True, False])
def test_a_long_wait_is_no_failure(monkeypatch: pytest.MonkeyPatch, can_store: bool) -> None:
    """Also while another load waits until more can be stored."""
    elsewhere = Elsewhere()
    seconds = itertools.count(time.monotonic())
    monkeypatch.setattr("jaxllm.scheduler.loading.time.monotonic", lambda: next(seconds))
    loading = elsewhere.scheduler.cache_manager.loading
    loading._patience_seconds, loading._awaits_stores = 5.0, not can_store
    elsewhere.tier.can_store = can_store
    request = add(elsewhere.engine, "a2")
    elsewhere.step(20)
    assert request.status is RequestStatus.WAITING_FOR_BLOCKS and request.loads_blocks


@pytest.mark.parametrize("num_there", [0, 3])
def test_what_another_engine_gives_up_is_computed(num_there: int) -> None:
    elsewhere = Elsewhere()
    request = add(elsewhere.engine, "a2")
    elsewhere.bring(num_there)
    elsewhere.step()
    elsewhere.tier.coming.clear()
    check_tokens(elsewhere.engine, request)
    assert request.num_cached_tokens == 4 * num_there


def other(name: str, length: int, max_tokens: int) -> Request:
    return make_request(name, [60] * length, max_tokens=max_tokens)


def run_until(engine: FakeEngine, request: Request) -> None:
    for _ in range(200):
        if request.status.is_finished:
            return
        engine.step()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("need", ["a new request", "a running request"])
def test_a_request_that_can_run_gets_the_blocks(need: str) -> None:
    """With a full cache: the waiting request loses copies of what the other engine keeps, and gets them again."""
    elsewhere = Elsewhere(num_blocks=13)  # 12 usable
    request = add(elsewhere.engine, "a2")
    elsewhere.bring(6)
    elsewhere.step()
    assert elsewhere.num_held() == 6
    second = other("n", 28, 2) if need == "a new request" else other("n", 20, 16)
    elsewhere.scheduler.add_request(second)
    run_until(elsewhere.engine, second)
    assert second.num_preemptions == 0, "it did not wait for the other engine"
    elsewhere.bring(2)
    check_tokens(elsewhere.engine, request)
    assert request.num_cached_tokens == 32, "it was not computed here"


def test_blocks_that_are_to_come_are_reserved_for_nobody() -> None:
    """A request that is admitted behind it, and one without room for its prompt, which waits without a load."""
    elsewhere = Elsewhere(num_blocks=13)
    second = other("n", 20, 24)
    elsewhere.scheduler.add_request(second)
    elsewhere.step(3)
    request = add(elsewhere.engine, "a2")
    elsewhere.bring(2)
    elsewhere.step(2)
    assert not request.status.is_finished and request.num_computed_tokens == 0
    third = other("m", 4, 2)
    elsewhere.scheduler.add_request(third)
    run_until(elsewhere.engine, third)
    assert second.status is RequestStatus.RUNNING and not request.status.is_finished
    run_until(elsewhere.engine, second)
    elsewhere.bring(6)
    check_tokens(elsewhere.engine, request)
    assert request.num_cached_tokens == 32


def test_a_load_that_waits_for_another_engine_reserves_nothing() -> None:
    elsewhere = Elsewhere(num_blocks=13)
    request = add(elsewhere.engine, "a2")
    elsewhere.step()
    assert request.status is RequestStatus.WAITING_FOR_BLOCKS
    second = other("n", 28, 8)  # nine of twelve blocks
    elsewhere.scheduler.add_request(second)
    run_until(elsewhere.engine, second)
    elsewhere.bring(8)
    check_tokens(elsewhere.engine, request)
    assert request.num_cached_tokens == 32


def test_of_two_requests_that_load_the_one_whose_blocks_are_all_there_goes_first() -> None:
    elsewhere = Elsewhere(num_blocks=15)
    waiting = add(elsewhere.engine, "a2")
    elsewhere.bring(6)
    elsewhere.step()
    assert elsewhere.num_held() == 6
    prompt = [33] * 44  # one of those that made the pool forget the first
    complete = make_request("c", prompt, max_tokens=1)
    loaded = elsewhere.tier.num_loaded
    elsewhere.scheduler.add_request(complete)
    run_until(elsewhere.engine, complete)
    assert elsewhere.tier.num_loaded - loaded + (complete.num_cached_tokens == 40) > 0, "it was computed"
    assert not waiting.status.is_finished
    elsewhere.bring(2)
    check_tokens(elsewhere.engine, waiting)
