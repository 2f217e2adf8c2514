"""Vectors of prompts and tokens, during generation and alone, against the hidden states of dense attention in float32."""

import numpy as np
import pytest

from jaxllm.request import ErrorKind, FinishReason
from jaxllm.runner.features.pooling.head import Pooling
from tests.helpers import engines, goldens

NAME, LONGEST = "qwen3", 112


@pytest.fixture(scope="module")
def core():
    core = engines.make_core(NAME, block_size=8, max_num_batched_tokens=24, token_buckets=(24,))
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def mean_core():
    core = engines.make_core(
        "llama_mqa",
        runner="pooling",
        pooler_config={"pooling_type": "mean"},
        tensor_parallel_size=2,
        warmup="all",
        block_size=8,
        max_num_batched_tokens=24,
        token_buckets=(24,),
        num_gpu_blocks_override=17,
    )
    yield core
    core.shutdown()


def prompts(lengths, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(128, size=length).tolist() for length in lengths]


def hidden(core, prompt) -> np.ndarray:
    config, state = _state(core.model_config.architecture)
    return goldens.hidden(config, state, prompt, pad_to=LONGEST)


def _state(architecture):
    return goldens.load(goldens.golden(NAME if architecture.startswith("Qwen") else "llama_mqa").directory)


def check(answer, expected) -> None:
    assert answer.finish_reason is FinishReason.STOP and answer.tokens == []
    assert answer.pooled is not None and answer.pooled.dtype == np.float32
    np.testing.assert_allclose(answer.pooled, expected, atol=2e-4)


def test_vectors_and_text_come_from_the_same_steps(core):
    """More requests than rows, prompts longer than a step, one of a single token, one as long as the model takes."""
    engines.reschedule(core)
    results = goldens.golden(NAME).results
    texts = prompts([1, 2, 40, LONGEST, 7])
    requests = [engines.request(f"text {i}", result.prompt, max_tokens=20) for i, result in enumerate(results[:3])]
    requests += [engines.pooling_request(f"one {i}", prompt) for i, prompt in enumerate(texts)]
    requests += [
        engines.pooling_request(f"all {i}", p, task="token_embed", skip_reading_prefix_cache=True) for i, p in enumerate(texts)
    ]
    answers = engines.run(core, requests[::-1])
    for i, result in enumerate(results[:3]):
        assert answers[f"text {i}"].tokens == result.tokens[:20]
    for i, prompt in enumerate(texts):
        expected = hidden(core, prompt)
        check(answers[f"one {i}"], expected[-1])
        check(answers[f"all {i}"], expected)


def test_lengths_and_widths_of_vectors(core):
    engines.reschedule(core)
    (prompt,) = prompts([30])
    asked = {"use_activation": True}, {"dimensions": 10}, {"use_activation": True, "dimensions": 10}
    requests = [engines.pooling_request(f"one {i}", prompt, **params) for i, params in enumerate(asked)]
    requests += [
        engines.pooling_request(f"all {i}", prompt, task="token_embed", **p, skip_reading_prefix_cache=True)
        for i, p in enumerate(asked)
    ]
    answers = engines.run(core, requests)
    whole = hidden(core, prompt)
    for i, params in enumerate(asked):
        expected = whole[:, : params.get("dimensions")]
        if params.get("use_activation"):
            expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        check(answers[f"one {i}"], expected[-1])
        check(answers[f"all {i}"], expected)


def test_a_cached_prompt_is_read_and_its_last_token_computed_again(core):
    engines.reschedule(core)
    (prompt,) = prompts([40])
    for request_id, num_cached in (("first", 0), ("again", 40)):
        answer = engines.run(core, [engines.pooling_request(request_id, prompt)])[request_id]
        check(answer, hidden(core, prompt)[-1])
        assert answer.num_cached_tokens == num_cached
    longer = [*prompt, *prompts([5], seed=1)[0]]
    answer = engines.run(core, [engines.pooling_request("longer", longer)])["longer"]
    check(answer, hidden(core, longer)[-1])
    assert answer.num_cached_tokens == 40
    skipping = engines.pooling_request("all", prompt, task="token_embed", skip_reading_prefix_cache=True)
    answer = engines.run(core, [skipping])["all"]
    check(answer, hidden(core, prompt))
    assert answer.num_cached_tokens == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.slow
def test_preempted_requests_begin_again(core, async_scheduling):
    # Eight tokens of each in a step: all are half done when the blocks run out.
    options = {"enable_prefix_caching": False, "scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 8}
    engines.reschedule(core, num_blocks=16, async_scheduling=async_scheduling, **options)
    texts = prompts([90, 80, 70])
    requests = [engines.pooling_request("one", texts[0])]
    requests += [
        engines.pooling_request(f"all {i}", p, task="token_embed", skip_reading_prefix_cache=True) for i, p in enumerate(texts)
    ]
    answers = engines.run(core, [*requests, engines.request("text", texts[0][:8], max_tokens=60)])
    assert core.stats().num_preemptions > 0
    check(answers["one"], hidden(core, texts[0])[-1])
    for i, prompt in enumerate(texts):
        check(answers[f"all {i}"], hidden(core, prompt))


def test_an_aborted_request_leaves_nothing(core):
    engines.reschedule(core)
    long, short = prompts([100, 9])

    def abort(step, answers):
        if step == 1:
            core.abort_requests(["long"])

    answers = engines.run(
        core, [engines.pooling_request("long", long), engines.pooling_request("short", short)], after_step=abort
    )
    assert answers["long"].pooled is None and answers["long"].finish_reason is None
    check(answers["short"], hidden(core, short)[-1])


def test_vectors_that_are_not_numbers_fail_their_request_alone(core, monkeypatch):
    engines.reschedule(core)
    long, short = prompts([12, 9])
    pooling = next(head for head in core.runner.heads if isinstance(head, Pooling))
    launch = pooling.launch

    def with_nan(work, hidden):
        (pending,) = launch(work, hidden)
        places = [i for i, chunk in enumerate(pending.finished) if chunk.row.data.request_id == "broken"]
        vectors_RD = pending.vectors_RD if not places else pending.vectors_RD.at[places[0]].set(np.nan)
        return [type(pending)(pending.finished, vectors_RD, pending.by_token, pending.hidden_TD)]

    monkeypatch.setattr(pooling, "launch", with_nan)
    answers = engines.run(core, [engines.pooling_request("broken", long), engines.pooling_request("short", short)])
    broken = answers["broken"]
    assert (broken.finish_reason, broken.error_kind) == (FinishReason.ERROR, ErrorKind.NOT_FINITE)
    assert broken.pooled is None
    check(answers["short"], hidden(core, short)[-1])


@pytest.mark.slow
def test_means_over_chunks_on_two_devices_with_preemption(mean_core):
    """A model that only pools: no program of generation is there, and none is made late."""
    assert {key.kind for key in mean_core.runner.programs._compiled} == {
        "forward",
        "add_up",
        "pool",
        "write_blocks",
        "new_caches",
    }
    num_programs = len(mean_core.runner.programs)
    texts = prompts([1, 3, 24, 25, LONGEST, 60, 60, 17, 90])
    requests = [engines.pooling_request(f"one {i}", p, skip_reading_prefix_cache=True) for i, p in enumerate(texts)]
    requests.append(engines.pooling_request("all", texts[5], task="token_embed", skip_reading_prefix_cache=True))
    engines.reschedule(mean_core, scheduler_reserve_full_isl=False, long_prefill_token_threshold=8)
    answers = engines.run(mean_core, requests)
    assert mean_core.stats().num_preemptions > 0
    for i, prompt in enumerate(texts):
        check(answers[f"one {i}"], hidden(mean_core, prompt).mean(axis=0))
    check(answers["all"], hidden(mean_core, texts[5]))
    assert len(mean_core.runner.programs) == num_programs and mean_core.num_compiled_after_warmup == 0
