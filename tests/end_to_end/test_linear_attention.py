"""Engines of a model whose layers keep a state by row: rows change hands while steps are in flight, and the engine sleeps."""

import logging
import random
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.errors import ConfigError
from jaxllm.kernel_policy import platform_policy
from jaxllm.layers.gated_delta_net import GatedDelta
from jaxllm.layers.moe import MixtureOfExperts
from jaxllm.request import FinishReason
from tests.helpers import engines, goldens

NAME = "qwen3_next"
RESULTS = goldens.golden(NAME).results


@pytest.fixture(scope="module")
def core():
    core = engines.make_core(NAME, num_gpu_blocks_override=300)
    yield core
    core.shutdown()


def requests(count: int, rng: random.Random) -> list:
    """Many short requests over few rows: prompts of goldens, of which some are cut within what follows them."""
    found = []
    for i in range(count):
        result = RESULTS[i % len(RESULTS)]
        num_given, num_tokens = rng.choice((0, 0, 5, 30)), rng.randint(1, 12)
        prompt = result.prompt + result.tokens[:num_given]
        expected = result.tokens[num_given : num_given + num_tokens]
        # Half of them end by a stop token, which the host sees only when later steps of the request are in flight.
        stops = {} if i % 2 else {"stop_token_ids": [expected[-1]], "ignore_eos": False}
        found.append((engines.request(str(i), prompt, max_tokens=num_tokens, **stops), expected))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_a_row_starts_anew_with_each_owner(core, max_in_flight):
    """Requests end, are stopped and aborted with steps in flight, and others take over their rows at once."""
    rng = random.Random(max_in_flight)
    options = {"max_num_batched_tokens": 24, "async_scheduling": max_in_flight > 1, "max_in_flight": max_in_flight}
    engines.reschedule(core, **options)
    wanted = requests(40, rng)
    aborted = {str(i) for i in range(3, 40, 7)}

    def abort(step: int, answers: dict[str, engines.Answer]) -> None:
        for request_id in aborted:
            if len(answers[request_id].tokens) > 1:
                core.abort_requests([request_id])

    answers = engines.run(core, [request for request, _ in wanted], after_step=abort)
    for request, expected in wanted:
        answer = answers[request.request_id]
        stops = request.sampling_params.stop_token_ids or ()
        ends = [i + 1 for i, token in enumerate(expected) if token in stops]
        expected = expected[: ends[0]] if ends else expected
        if request.request_id in aborted and answer.finish_reason is None:
            assert answer.tokens == expected[: len(answer.tokens)]
        else:
            assert answer.tokens == expected and answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.slow
def test_kernels_of_few_rows_give_the_same_tokens(monkeypatch):
    """In decodes, with rows of earlier owners and of padding, one computes all between the products of linear attention, another routers
    before the norm; steps with prompts take the other path."""
    num_rows, num_routed = [], []
    joined, scores = GatedDelta._in_one_kernel, MixtureOfExperts._scores_of_unnormed

    def spy(self, qkvz_TKC, ba_TKC, step):
        out = joined(self, qkvz_TKC, ba_TKC, step)
        num_rows.append((len(qkvz_TKC), out is not None))
        return out

    def spy_scores(self, unnormed, step, start):
        num_routed.append(len(unnormed.x_TD))
        return scores(self, unnormed, step, start)

    monkeypatch.setattr(GatedDelta, "_in_one_kernel", spy)
    monkeypatch.setattr(MixtureOfExperts, "_scores_of_unnormed", spy_scores)
    policy = replace(platform_policy(on_gpu=False), max_joined_rows=4, max_concurrent_rows=4)
    core = engines.make_core(NAME, kernel_policy=policy, attention_implementation="triton", warmup="lazy")
    assert [core.kernels[op].implementation for op in ("delta_decode", "router_scores")] == ["triton", "triton"]
    for num_requests in (4, 1, 2):
        requests = [engines.request(f"{num_requests}-{i}", RESULTS[i].prompt, max_tokens=6) for i in range(num_requests)]
        answers = engines.run(core, requests)
        assert [answers[each.request_id].tokens for each in requests] == [each.tokens[:6] for each in RESULTS[:num_requests]]
    core.shutdown()
    assert {is_joined for count, is_joined in num_rows if count <= 4} == {True} and set(num_routed) == {4}
    assert {is_joined for count, is_joined in num_rows if count > 4} == {False}


@pytest.mark.slow
def test_states_are_released_by_sleep_and_made_again(core):
    engines.reschedule(core)
    layout, caches = core.memory_plan.cache, core.runner.caches
    states = caches[len(layout.arrays) :]
    assert len(states) == 6 and sum(state.nbytes for state in states) == core.memory_plan.state_bytes
    assert [state.shape for state in states[:2]] == [(5, 4, 3, 48), (5, 4, 2, 16, 8)]
    core.sleep(1)
    assert all(array.is_deleted() for array in caches)
    core.wake_up()
    for name in "ab":
        answer = engines.run(core, [engines.request(name, RESULTS[0].prompt, max_tokens=6)])[name]
        assert answer.tokens == RESULTS[0].tokens[:6]


@pytest.mark.slow
def test_what_is_not_finite_stays_in_its_row(core):
    """A request whose state is NaN fails alone, and the next owner of the row is well."""
    engines.reschedule(core, async_scheduling=False)
    poisoned = False

    def poison(step: int, answers: dict[str, engines.Answer]) -> None:
        nonlocal poisoned
        if not poisoned and len(answers["0"].tokens) == 2:
            row = core.runner.rows[0].by_request["0"].index
            caches, poisoned = list(core.runner.caches), True
            state = np.array(caches[-1])
            state[row] = np.nan
            caches[-1] = jax.device_put(state, caches[-1].sharding)
            core.runner.caches = tuple(caches)

    all_requests = [engines.request(str(i), RESULTS[i % 4].prompt, max_tokens=8) for i in range(8)]
    answers = engines.run(core, all_requests, after_step=poison)
    assert answers["0"].finish_reason is FinishReason.ERROR and len(answers["0"].tokens) == 2
    for i in range(1, 8):
        assert answers[str(i)].tokens == RESULTS[i % 4].tokens[:8]


@pytest.mark.slow
def test_prompts_that_begin_alike_continue_behind_states_and_get_the_same_tokens(core):
    """In chunks, through preemption, aborts and an empty cache, and as often as not with the states of others."""
    rng = random.Random(3)
    prompts = [
        result.prompt[:given] + [5] * rng.randint(0, 9) for result in RESULTS for given in (len(result.prompt), 37, 50, 51)
    ]
    wanted = [engines.request(f"{i}", prompt, max_tokens=8) for i, prompt in enumerate(prompts * 3)]
    options = {"max_num_batched_tokens": 24, "max_in_flight": 3}
    engines.reschedule(core, **options, enable_prefix_caching=False)
    alone = engines.run(core, wanted)
    assert not core.stats().num_stored_states
    engines.reschedule(core, **options, num_blocks=40, prefix_cache_retention_interval=32)
    aborted = {f"{i}" for i in range(2, len(wanted), 7)}

    def disturb(step: int, answers: dict[str, engines.Answer]) -> None:
        core.abort_requests([request_id for request_id in aborted if len(answers[request_id].tokens) > 2])
        if step % 40 == 39:
            core.reset_prefix_cache(reset_running_requests=True)

    found = engines.run(core, wanted, after_step=disturb)
    for request_id, answer in found.items():
        expected = alone[request_id].tokens
        assert answer.tokens == (expected if answer.finish_reason is not None else expected[: len(answer.tokens)])
    stats = core.stats()
    assert stats.num_preemptions > 3 and min(stats.num_stored_states, stats.num_loaded_states) > 10
    assert stats.prefix_cache_hits + stats.resumed_prefix_cache_hits > 400


@pytest.mark.slow
def test_an_equal_prompt_computes_less_than_a_block(core):
    """And one that begins the same way, after a second prompt has shown where."""
    engines.reschedule(core)
    alike = [7 * i % 60 for i in range(61)]
    computed = []
    for name, rest in (("a", [1] * 30), ("a again", [1] * 30), ("b", [2] * 30), ("c", [3] * 30)):
        before = core.stats().num_step_tokens
        engines.run(core, [engines.request(name, [*alike, *rest], max_tokens=1)])
        computed.append(core.stats().num_step_tokens - before)
    assert computed == [91, 91 - 80, 91, 91 - 48]


def resolve(enable_prefix_caching: bool | None, **options) -> EngineConfig:
    directory = goldens.golden(NAME).directory
    options = {**engines.SMALL, "enable_prefix_caching": enable_prefix_caching, **options}
    return resolve_sizes(EngineConfig.from_options(model=str(directory), **options), directory)[0]


@pytest.mark.parametrize(("asked", "is_on"), [(None, True), (True, True), (False, False)])
def test_prefix_caching_is_on(asked, is_on):
    assert resolve(asked).cache.enable_prefix_caching is is_on


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"enable_chunked_prefill": False}, "states are kept between chunks of a prompt (enable_chunked_prefill)"),
        ({"pipeline_parallel_size": 2}, "its stages keep states apart from blocks (pipeline_parallel_size)"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "data-parallel ranks copy no states (data_parallel_size)"),
    ],
)
def test_prefix_caching_is_off_where_states_are_not_kept_and_refused_if_it_is_asked_for(options, told, caplog):
    caplog.set_level(logging.INFO, logger="jaxllm")
    assert resolve(None, **options).cache.enable_prefix_caching is False
    assert "prefix caching is off: Qwen3NextForCausalLM has layers with linear attention" in caplog.text and told in caplog.text
    with pytest.raises(ConfigError, match=re.escape(told) + ".* --no-enable-prefix-caching"):
        resolve(True, **options)
