"""A prompt whose every block is in the prefix cache: one token is computed, nothing shared is written, the answer is the same."""

import jax
import numpy as np
import pytest

from tests.helpers import engines, goldens

pytestmark = pytest.mark.slow

NAME, PLACE = "qwen3", 5
"""The golden's prompt of 40 tokens: five whole blocks of 8."""


@pytest.fixture(scope="module")
def core():
    core = engines.make_core(NAME, block_size=8)
    yield core
    core.shutdown()


def cached_blocks(core) -> list[np.ndarray]:
    """Keys and values of every layer in the blocks that hold the prompt."""
    ids = core.scheduler.cache_manager
    hashes = hashes_of_prompt(core)
    blocks = [ids.pool.find(block_hash) for block_hash in hashes]
    assert len(blocks) == 5 and all(block is not None for block in blocks)
    return [np.array(cache)[[block.block_id for block in blocks if block]] for cache in jax.device_get(core.runner.caches)]


def hashes_of_prompt(core) -> list[bytes]:
    from jaxllm.request import Request
    from jaxllm.scheduler.block_hash import block_hasher

    request = Request(engines.request("probe", goldens.golden(NAME).results[PLACE].prompt))
    block_hasher(8, "sha256")(request)
    return request.block_hashes


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 0}, {"logit_bias": {0: 0.0}}], ids=["decode program", "logprobs", "full sampling"]
)
def test_only_the_last_token_is_computed(core, monkeypatch, params, async_scheduling):
    engines.reschedule(core, async_scheduling=async_scheduling)
    result = goldens.golden(NAME).results[PLACE]
    first = engines.run(core, [engines.request("first", result.prompt, max_tokens=64)])["first"]
    assert first.tokens == result.tokens and first.num_cached_tokens == 0
    before = cached_blocks(core)
    assert all(np.abs(array).sum() > 0 for array in before)

    counts, dispatch = [], core.runner.dispatch
    monkeypatch.setattr(
        core.runner, "dispatch", lambda plan: (counts.append(plan.num_scheduled_tokens.copy()), dispatch(plan))[1]
    )
    again = engines.run(core, [engines.request("again", result.prompt, max_tokens=64, **params)])["again"]
    assert again.tokens == result.tokens
    assert again.num_cached_tokens == len(result.prompt)
    assert counts[0] == {"again": 1} and len(counts) == 64
    for array, was in zip(cached_blocks(core), before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_many_share_the_blocks_of_one_that_still_runs(core):
    engines.reschedule(core)
    result = goldens.golden(NAME).results[PLACE]
    before: list[np.ndarray] = []

    def others_come(step: int, answers: dict[str, engines.Answer]) -> None:
        if step == 4:
            before.extend(cached_blocks(core))
            for i in range(3):
                core.add_request(engines.request(f"other {i}", result.prompt, max_tokens=64))
        if step == 20:
            pool = core.scheduler.cache_manager.pool
            assert [pool.find(block_hash).ref_count for block_hash in hashes_of_prompt(core)] == [4] * 5

    answers = engines.run(core, [engines.request("first", result.prompt, max_tokens=64)], after_step=others_come)
    assert len(answers) == 4
    for request_id, answer in answers.items():
        assert answer.tokens == result.tokens
        assert answer.num_cached_tokens == (0 if request_id == "first" else len(result.prompt))
    for array, was in zip(cached_blocks(core), before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_salts_and_skipping_keep_requests_apart(core):
    engines.reschedule(core)
    result = goldens.golden(NAME).results[PLACE]
    engines.run(core, [engines.request("first", result.prompt, max_tokens=2)])
    skipping = engines.request("skipping", result.prompt, max_tokens=2, skip_reading_prefix_cache=True)
    answers = engines.run(core, [skipping])
    assert answers["skipping"].num_cached_tokens == 0 and answers["skipping"].tokens == result.tokens[:2]
    assert core.reset_prefix_cache()
    assert engines.run(core, [engines.request("after", result.prompt, max_tokens=2)])["after"].num_cached_tokens == 0
