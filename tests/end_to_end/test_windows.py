"""Engines whose layers have windows: they hold only the window, and answer as engines that keep everything do."""

import jax
import numpy as np
import pytest

from tests.helpers import engines, goldens

pytestmark = pytest.mark.slow

LONG = {"max_model_len": 256, "block_size": 8, "max_num_batched_tokens": 64, "token_buckets": (64,)}
WINDOW = 16
BLOCKS_IN_WINDOW = WINDOW // LONG["block_size"] + 1
"""With the block of the next token."""
NUM_TOKENS = 10 * WINDOW


@pytest.fixture(scope="module")
def model():
    """Name of a golden, of whose layers one has a window and one has none; its engine; its answers when all layers keep everything."""
    core = engines.make_core("qwen2_window", disable_hybrid_kv_cache_manager=True, **LONG)
    assert core.scheduler.cache_manager.policies == (core.memory_plan.cache.policies[0],)
    answers = engines.run(core, requests_of("qwen2_window"))
    core.shutdown()
    core = engines.make_core("qwen2_window", num_gpu_blocks_override=200, **LONG)
    yield "qwen2_window", core, {name: answer.tokens for name, answer in answers.items()}
    core.shutdown()


def requests_of(name):
    results = goldens.golden(name).results
    long = results[-1].prompt * 2
    prompts = [long, long + [3], *(result.prompt for result in results[-2:])]
    return [engines.request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)]


def tokens(answers):
    return {name: answer.tokens for name, answer in answers.items()}


def test_a_request_holds_only_its_window(model):
    name, core, expected = model
    engines.reschedule(core)
    manager, held = core.scheduler.cache_manager, []

    def note_blocks(step, answers):
        if answers["0"].tokens and answers["0"].finish_reason is None:
            held.append((manager.num_blocks_of("0"), len(manager.block_ids("0")) // len(manager.policies)))

    assert tokens(engines.run(core, requests_of(name)[:1], after_step=note_blocks)) == {"0": expected["0"]}
    num_full = len(manager.policies) - 1
    assert num_full == 1
    # The window of the first decode still holds blocks of the prompt's last step.
    assert max(blocks - num_full * length for blocks, length in held[WINDOW:]) <= BLOCKS_IN_WINDOW
    assert held[-1][1] >= (80 + NUM_TOKENS - 3) // 8


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_answers_are_those_of_layers_that_keep_everything(model, caching, max_in_flight):
    """In a cache of NaN, with chunks and preemption: nothing is read that was not written, or that another request has written over."""
    name, core, expected = model
    caches = core.runner.caches
    core.runner.caches = tuple(jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding) for x in caches)
    engines.reschedule(
        core,
        num_blocks=46,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24,
        scheduler_reserve_full_isl=False,
        async_scheduling=max_in_flight > 1,
        max_in_flight=max_in_flight,
    )
    assert tokens(engines.run(core, requests_of(name))) == expected
    assert core.stats().num_preemptions > 0


def test_prefixes_are_found_where_their_last_window_is_cached(model):
    name, core, expected = model
    engines.reschedule(core)
    assert tokens(engines.run(core, requests_of(name)[:1])) == {"0": expected["0"]}
    manager = core.scheduler.cache_manager
    request = requests_of(name)[1]
    answers = engines.run(core, [request])
    assert answers["1"].num_cached_tokens == 80 and answers["1"].tokens == expected["1"]
    core.sleep()
    core.wake_up()
    assert manager is not core.scheduler.cache_manager
    answers = engines.run(core, [request])
    assert answers["1"].num_cached_tokens == 0 and answers["1"].tokens == expected["1"]
