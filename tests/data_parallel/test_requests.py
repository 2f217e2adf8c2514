"""An engine of two data-parallel ranks answers requests of every kind as one device does, wherever they are."""

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxllm.engine.fault_points import injected
from jaxllm.errors import InvalidRequestError
from jaxllm.request import FinishReason
from jaxllm.request_options import RequestOptions
from tests.data_parallel.conftest import NAME
from tests.helpers import engines, every_kind, goldens
from tests.helpers.every_kind import check

pytestmark = pytest.mark.slow

PROMPTS = [result.prompt for result in goldens.golden(NAME).results]


def requests():
    """Two grammars, so that both data-parallel ranks have one."""
    found = every_kind.requests(PROMPTS)
    (grammar,) = [each for each in found if each.request_id == "grammar"]
    return [*found, replace(grammar, request_id="grammar 2", prompt_token_ids=PROMPTS[2])]


def pinned(request, rank):
    return replace(request, options=RequestOptions(data_parallel_rank=rank))


@pytest.fixture(scope="module")
def expected(one_device):
    engines.renew(one_device)
    return engines.run(one_device, requests())


@pytest.fixture
def core(two_ranks):
    engines.renew(two_ranks)
    yield two_ranks
    two_ranks._dead = None
    two_ranks.wake_up()


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"max_num_batched_tokens": 16},
        {"num_blocks": 8, "max_in_flight": 3},
    ],
    ids=str,
)
def test_requests_of_every_kind_have_the_answers_of_one_device(core, expected, options):
    """Fewer and more steps in flight, prompts in chunks, and requests preempted. Data-parallel ranks with a request or none: below."""
    every_kind.check_twice(core, requests, expected, **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_computes_while_the_other_has_nothing(core, expected, rank):
    check(engines.run(core, [pinned(request, rank) for request in requests()]), expected)
    idle = core.scheduler.ranks[1 - rank]
    assert idle.stats().num_step_tokens == 0 and not idle.requests


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrivals_and_ends_leaves_the_others_as_they_are(core, expected, seed):
    rng = random.Random(seed)
    waiting = [pinned(request, rng.choice([0, 1, None])) for request in requests()]
    rng.shuffle(waiting)

    def come_and_go(step, answers):
        for _ in range(min(rng.randrange(3), len(waiting))):
            core.add_request(waiting.pop())
        brief = f"brief {step // 4}"
        if step % 4 == 1 and step < 60:
            core.add_request(engines.request(brief, PROMPTS[step % 5], max_tokens=20))
        if step % 4 == 3:
            core.abort_requests([brief])
            answers.pop(brief, None)

    engines.reschedule(core, num_blocks=rng.choice([8, 20]), max_in_flight=rng.choice([1, 2, 3]))
    found = engines.run(core, [waiting.pop(), engines.request("long", PROMPTS[1], max_tokens=60)], after_step=come_and_go)
    assert not waiting
    check({name: answer for name, answer in found.items() if name in expected}, expected)
    core.check_integrity()


def test_a_request_goes_where_its_prompt_is_cached_else_where_less_is_queued(core):
    ranks = core.scheduler.ranks
    long = PROMPTS[4] * 3
    engines.run(core, [pinned(engines.request("first", long, max_tokens=2), 1)])
    again = engines.run(core, [engines.request("again", [*long, 1, 2], max_tokens=2)])["again"]
    assert again.num_cached_tokens > 0
    for i in range(4):
        core.add_request(engines.request(str(i), [i + 1] * 40, max_tokens=4))
    assert [len(rank.requests) for rank in ranks] == [2, 2]
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2"):
        core.add_request(pinned(engines.request("nowhere", [1], max_tokens=1), 2))
    with pytest.raises(InvalidRequestError, match="in use"):
        core.add_request(engines.request("3", [1], max_tokens=1))
    assert not core.reset_prefix_cache() or not core.scheduler.holds_blocks
    engines.run(core, [])
    assert core.reset_prefix_cache()
    assert engines.run(core, [engines.request("anew", long, max_tokens=2)])["anew"].num_cached_tokens == 0


@pytest.mark.parametrize("faults", ["step:3:oom", "draw:2:oom", "result:1:oom,launch:5:oom"])
def test_after_failed_steps_every_request_has_the_tokens_it_would_have_had(core, expected, faults):
    every_kind.check_after_failed_steps(core, requests, expected, faults)


def test_an_error_ends_the_step_of_all_ranks(core, expected):
    with injected("launch:4:error"):
        found = engines.run(core, requests())
    failed = {name for name, answer in found.items() if answer.finish_reason is FinishReason.ERROR}
    assert failed and core.stats().num_lost_steps == 1
    check({name: answer for name, answer in found.items() if name not in failed}, expected)
    check(engines.run(core, requests()), expected)


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_the_ranks_have_their_weights_and_caches_again(core, expected, level):
    every_kind.check_after_sleep(core, requests, expected, level)


def test_a_pause_keeps_the_requests_of_all_ranks(core, expected):
    for each in requests():
        core.add_request(each)
    answers = {each.request_id: engines.Answer() for each in requests()}
    for _ in range(3):
        for output in core.step():
            answers[output.request_id].take(output)
    core.pause("keep")
    assert core.step() == []
    core.resume()
    while core.has_unfinished_requests():
        for output in core.step():
            answers[output.request_id].take(output)
    check(answers, expected)


def test_tokens_of_experts_are_counted_in_all_ranks(core, one_device):
    tables = []
    for each in (core, one_device):
        engines.renew(each)
        engines.reschedule(each, enable_prefix_caching=False)
        before = np.array(each.expert_load()["tokens"])
        engines.run(each, requests())
        tables.append(np.array(each.expert_load()["tokens"]) - before)
    np.testing.assert_array_equal(*tables)
    assert tables[0].sum() and 0 < core.stats().expert_balance <= 1
    assert len(core.runner.row_arrays.of_features["expert_tokens_LE"]) == 2


def test_devices_share_the_experts_and_have_the_rest_each(core, one_device):
    runner = core.runner
    whole = {array.shape: array for array in one_device.runner.params}
    for array in runner.params:
        parts = [shard.data for shard in array.addressable_shards]
        assert len(parts) == 2
        is_split = not array.sharding.is_fully_replicated
        assert all(part.size * (2 if is_split else 1) == array.size for part in parts) and array.shape in whole
    split = [array for array in runner.params if not array.sharding.is_fully_replicated]
    assert len(split) == 2  # gate and up, and down
    for cache in runner.caches:
        assert [shard.data.shape[0] for shard in cache.addressable_shards] == [core.memory_plan.num_blocks] * 2
