"""The priority policy: who is admitted, who is preempted."""

import random

import pytest

from jaxllm.request import RequestStatus
from jaxllm.scheduler_output import ModelRunnerOutput
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler, result_of, step


def priority_scheduler(**options):
    return make_scheduler(scheduling_policy="priority", **options)


def add(scheduler, *requests):
    for request in requests:
        scheduler.add_request(request)
    return requests


def ids(requests):
    return [request.request_id for request in requests]


@pytest.mark.parametrize(
    ("priorities", "arrivals", "expected"),
    [
        ([2, 0, 1], [0, 0, 0], [1, 2, 0]),
        ([1, 1, 1], [3.0, 1.0, 2.0], [1, 2, 0]),
        ([0, 1, 0, 1], [4.0, 1.0, 2.0, 3.0], [2, 0, 1, 3]),
        ([0, 0, 0], [1.0, 1.0, 1.0], [0, 1, 2]),
    ],
)
def test_admission_by_priority_then_arrival_then_id(priorities, arrivals, expected):
    scheduler = priority_scheduler()
    for i, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True)):
        scheduler.add_request(make_request(f"r{i}", 10, priority=priority, arrival=arrival))
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == [f"r{i}" for i in expected]


def test_only_the_best_run_when_places_are_few():
    scheduler = priority_scheduler(max_num_seqs=2)
    add(scheduler, *(make_request(f"r{i}", 10, priority=5 - i) for i in range(5)))
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["r4", "r3"] and len(scheduler.waiting) == 3
    add(scheduler, make_request("best", 10, priority=-9))
    plan, _ = step(scheduler)
    assert "best" not in plan.num_scheduled_tokens  # a waiting request preempts none
    assert scheduler.waiting.peek().request_id == "best"


def test_nobody_is_preempted_while_there_is_space():
    scheduler = priority_scheduler(num_blocks=100)
    add(scheduler, *(make_request(f"r{i}", 30, priority=5) for i in range(2)))
    step(scheduler)
    add(scheduler, make_request("best", 30, priority=0))
    plan, _ = step(scheduler)
    assert plan.preempted_request_ids == [] and len(scheduler.running) == 3


def test_the_victim_is_the_least_urgent_wherever_it_stands():
    scheduler = priority_scheduler(num_blocks=11, caching=False)
    low, high = make_request("low", 80, priority=1), make_request("high", 80, priority=0)
    add(scheduler, low)
    first = scheduler.schedule()
    add(scheduler, high)
    second = scheduler.schedule()
    scheduler.update_from_output(first, ModelRunnerOutput({"low": [1]}))
    scheduler.update_from_output(second, ModelRunnerOutput({"high": [1]}))
    assert ids(scheduler.running) == ["low", "high"]
    plan, _ = step(scheduler)
    # low stands first and finds no block, but it is itself the victim; high then runs on
    assert plan.preempted_request_ids == ["low"] and list(plan.num_scheduled_tokens) == ["high"]
    assert ids(scheduler.running) == ["high"] and low.status == RequestStatus.PREEMPTED


def make_running(scheduler, *requests):
    """Admit the requests one step after the other, so that `running` keeps this order."""
    for request in requests:
        scheduler.add_request(request)
        plan = scheduler.schedule()
        result = result_of(scheduler, plan)
        assert request.request_id in plan.num_scheduled_tokens
        scheduler.update_from_output(plan, result)


def test_a_victim_already_in_the_step_is_taken_out_and_its_tokens_given_back():
    # 9 usable blocks. "low" stands before "high" and gets the last block; then "high" needs one.
    scheduler = priority_scheduler(num_blocks=10, max_num_batched_tokens=100)
    low, high = make_request("low", 30, priority=9), make_request("high", 93, priority=0)
    make_running(scheduler, low, high)
    step(scheduler)
    step(scheduler)
    assert (low.num_computed_tokens, high.num_computed_tokens) == (33, 95)
    while high.num_computed_tokens < 96:
        step(scheduler)
    assert scheduler.cache_manager.pool.num_free_blocks == 0 and ids(scheduler.running) == ["low", "high"]
    before = low.num_computed_tokens
    plan, outputs = step(scheduler)
    assert plan.preempted_request_ids == ["low"]
    assert plan.num_scheduled_tokens == {"high": 1} and plan.num_tokens == 1 and not plan.new_requests
    assert ids(outputs) == ["high"] and low.num_computed_tokens == 0 and before == 34


def test_the_tokens_given_back_serve_later_requests_of_the_same_step():
    # 6 usable blocks, all taken; "high" is the first to need another, when "low" has its token of this step already.
    scheduler = priority_scheduler(num_blocks=7, caching=False)
    for name, length, priority in (("low", 30, 9), ("high", 31, 0), ("mid", 30, 1)):
        scheduler.add_request(make_request(name, length, priority=priority))
    step(scheduler)
    scheduler.running.sort(key=lambda request: ("low", "high", "mid").index(request.request_id))
    scheduler.limits.max_num_batched_tokens = 2
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"low": 1, "high": 1}
    plan, _ = step(scheduler)
    assert plan.preempted_request_ids == ["low"] and plan.num_scheduled_tokens == {"high": 1, "mid": 1}


def test_a_step_that_preempts_admits_nobody():
    scheduler = priority_scheduler(num_blocks=11, caching=False)
    add(scheduler, make_request("high", 80, priority=0), make_request("low", 80, priority=9))
    step(scheduler)
    add(scheduler, make_request("mid", 10, priority=5))
    plan, _ = step(scheduler)
    assert plan.preempted_request_ids == ["low"] and list(plan.num_scheduled_tokens) == ["high"]
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["high", "mid"]


def test_blocks_published_for_a_share_that_was_taken_back_are_not_found():
    # "low" would fill its second block in the very step in which it is preempted.
    scheduler = priority_scheduler(num_blocks=8)
    low, high = make_request("low", 30, priority=9), make_request("high", 78, priority=0)
    make_running(scheduler, low, high)
    assert low.num_computed_tokens == 31 and scheduler.cache_manager.pool.num_free_blocks == 0
    scheduler.running.remove(high)
    scheduler.running.append(high)
    high.append_output(7)
    high.append_output(7)
    plan = scheduler.schedule()
    assert plan.preempted_request_ids == ["low"] and plan.num_scheduled_tokens == {"high": 3}
    assert low.num_tokens == 32 and len(low.block_hashes) == 2
    assert len(scheduler.cache_manager.get_computed_blocks(low).blocks) == 1
    scheduler.cache_manager.check_integrity(scheduler.running)


def test_preempted_requests_return_in_order_of_priority():
    scheduler = priority_scheduler(num_blocks=11, caching=False)
    add(scheduler, *(make_request(f"r{i}", 50, priority=i, max_tokens=30) for i in range(2)))
    step(scheduler)
    add(scheduler, make_request("r2", 20, priority=2), make_request("r9", 20, priority=9))
    order = []
    while scheduler.has_requests():
        plan, _ = step(scheduler)
        order += [data.request_id for data in plan.new_requests]
    assert scheduler.stats().num_preemptions > 0
    assert order.index("r2") < order.index("r9")
    resumed = order[4:]
    assert resumed == sorted(resumed)


@pytest.mark.parametrize("seed", range(10))
def test_random_loads_lose_and_repeat_nothing(seed):
    rng = random.Random(seed)
    scheduler = priority_scheduler(num_blocks=24, max_num_batched_tokens=rng.choice([32, 64, 200]), max_num_seqs=6)
    requests = [
        make_request(f"r{i}", [rng.randrange(3)] * rng.randint(1, 120), priority=rng.randrange(4), arrival=rng.random(),
                     max_tokens=rng.randint(1, 60))
        for i in range(25)
    ]  # fmt: skip
    engine = FakeEngine(scheduler, vocab_size=5, depth=1)
    add(scheduler, *requests)
    tokens = engine.run()
    for request in requests:
        expected = oracle_tokens(request.spec.prompt_token_ids, request.sampling_params.max_tokens, 5)
        assert tokens[request.request_id] == expected
    assert scheduler.cache_manager.pool.num_free_blocks == 23
