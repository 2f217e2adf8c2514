"""Logprobs and ranks of whole engines against a dense computation of the same sequences; logits processors."""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.sampling.processors import Processor, load_processors
from scripts.gpu_checks.sampled_apart import sampling_apart
from tests.helpers import engines, goldens
from tests.helpers.slow import slow_except

NAME = "llama_gqa"
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def below(logits_RV, context):
    """Allows only token ids below the argument."""
    return jnp.where(jnp.arange(logits_RV.shape[1]) < context.arguments_RA[:, :1], logits_RV, -jnp.inf)


def unseen(logits_RV, context):
    """Forbids what the output has already."""
    return jnp.where(context.output_count_RV > 0, -jnp.inf, logits_RV)


UNSEEN = Processor("unseen", unseen)
UNDER = Processor("under", below, num_arguments=1, read=lambda given: [{"ten": 10.0}[given[0]]])
PROCESSORS = (Processor("below", below, num_arguments=1), UNSEEN, UNDER)


class Below(Processor):
    def __init__(self):
        super().__init__("below", below, num_arguments=1)


SCHEDULES = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 16, "async_scheduling": False},
    "preemption": {"max_num_batched_tokens": 16, "num_blocks": 10},
    "no cache": {"enable_prefix_caching": False},
    "rows": {"max_in_flight": 3},
}


@pytest.fixture(scope="module")
def core():
    core = engines.make_core(NAME, processors=PROCESSORS)
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def dense():
    """Logprobs [T, V] of a sequence, by the model without any engine."""
    config, state = goldens.load(goldens.golden(NAME).directory)

    def logprobs(token_ids: list[int]) -> np.ndarray:
        logits = goldens.logits(config, state, token_ids, pad_to=112).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return logprobs


def check_rows(expected: np.ndarray, found, tokens: list[int], num_likeliest: int) -> None:
    """Each row: the token, then the likeliest, with logprobs and the token's rank."""
    assert found.token_ids.shape == (len(tokens), 1 + num_likeliest)
    assert found.token_ids[:, 0].tolist() == tokens
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(expected, found.token_ids, axis=1), **TOLERANCE)
    np.testing.assert_allclose(found.logprobs[:, 1:], -np.sort(-expected, axis=1)[:, :num_likeliest], **TOLERANCE)
    own = expected[np.arange(len(tokens)), tokens][:, None]
    lowest, highest = (expected > own + 1e-5).sum(axis=1) + 1, (expected >= own - 1e-5).sum(axis=1)
    assert ((found.ranks >= lowest) & (found.ranks <= highest)).all()


@pytest.mark.parametrize("schedule", slow_except(["whole"], SCHEDULES))
def test_against_dense(core, dense, schedule):
    engines.reschedule(core, **SCHEDULES[schedule])
    prompts = [result.prompt for result in goldens.golden(NAME).results]
    kinds = [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"logprobs": 0, "prompt_logprobs": 0, "temperature": 1.0},
        {"logprobs": 1, "prompt_logprobs": 20, "repetition_penalty": 1.4},
        {"logprobs": 20, "temperature": 0.7, "top_k": 4},
        {"logprobs": 5, "prompt_logprobs": 1},
        {"prompt_logprobs": 4},
    ]
    requests = [
        engines.request(str(i), prompt, max_tokens=50, **{"seed": i, **params})
        for i, (prompt, params) in enumerate(zip(prompts, kinds, strict=True))
    ]
    for _ in range(2):  # the second time from the cache, as far as that may be
        with sampling_apart(core) if schedule == "rows" else nullcontext({1}) as sizes:
            answers = engines.run(core, requests)
        assert sizes
        for i, (prompt, params) in enumerate(zip(prompts, kinds, strict=True)):
            answer = answers[str(i)]
            expected = dense(prompt + answer.tokens)
            if "logprobs" in params:
                check_rows(expected[len(prompt) - 1 : -1], answer.token_logprobs, answer.tokens, params["logprobs"])
            else:
                assert not answer.logprobs
            if "prompt_logprobs" in params:
                check_rows(expected[: len(prompt) - 1], answer.prompt_logprobs, prompt[1:], params["prompt_logprobs"])
            else:
                assert answer.prompt_logprobs is None
    assert (core.stats().num_preemptions > 0) == (schedule == "preemption")
    if schedule in ("whole", "no cache"):
        assert (core.stats().prefix_cache_hits > 0) == (schedule == "whole")


@pytest.mark.parametrize("max_in_flight", slow_except([3], [1, 3]))
@pytest.mark.parametrize("params", [{}, {"logprobs": 1}], ids=["decode program", "full sampling"])
@pytest.mark.slow
def test_the_last_chunk_of_a_prompt_may_be_one_token(core, dense, params, max_in_flight):
    engines.reschedule(core, max_num_batched_tokens=16, max_in_flight=max_in_flight)
    prompts = {length: [5, *range(20, 19 + length)] for length in (1, 2, 16, 17, 33, 81)}
    for length, prompt in prompts.items():
        answer = engines.run(core, [engines.request("a", prompt, max_tokens=3, prompt_logprobs=2, **params)])["a"]
        assert answer.prompt_logprobs is not None
        check_rows(dense(prompt)[: length - 1], answer.prompt_logprobs, prompt[1:], 2)
    engines.reschedule(core)
    llm = LLM.from_config(core.config, core=core)
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=1, **params), use_tqdm=False)
    assert output.prompt_logprobs == [None]


def test_named_tokens(core, dense):
    engines.reschedule(core)
    prompt, named = goldens.golden(NAME).results[0].prompt, [5, 77, 5 + 1]
    requests = [
        engines.request("named", prompt, max_tokens=8, logprob_token_ids=named),
        engines.request("top", prompt, max_tokens=8, logprobs=2),
        engines.request("none", prompt, max_tokens=8),
    ]
    answers = engines.run(core, requests)
    expected = dense(prompt + answers["named"].tokens)[len(prompt) - 1 : -1]
    found = answers["named"].token_logprobs
    assert found.token_ids.tolist() == [[token, *named] for token in answers["named"].tokens]
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(expected, found.token_ids, axis=1), **TOLERANCE)
    check_rows(expected, answers["top"].token_logprobs, answers["top"].tokens, 2)
    assert not answers["none"].logprobs


@pytest.mark.slow
def test_processors_touch_only_who_asks(core):
    engines.reschedule(core)
    result = goldens.golden(NAME).results[0]
    requests = [
        engines.request("plain", result.prompt, max_tokens=20),
        engines.request("below", result.prompt, max_tokens=20, extra_args={"below": [30.0]}),
        engines.request("unseen", result.prompt, max_tokens=20, extra_args={"unseen": []}),
        engines.request("both", result.prompt, max_tokens=20, extra_args={"unseen": [], "below": [40.0]}),
    ]
    for schedule in ({}, {"max_num_batched_tokens": 16, "num_blocks": 9}):
        engines.reschedule(core, **schedule)
        answers = engines.run(core, requests)
        assert answers["plain"].tokens == result.tokens[:20]
        assert max(answers["below"].tokens) < 30
        assert len(set(answers["unseen"].tokens)) == 20
        assert len(set(answers["both"].tokens)) == 20 and max(answers["both"].tokens) < 40


def test_processors_through_llm(core):
    prompt = goldens.golden(NAME).results[0].prompt
    engines.reschedule(core)
    llm = LLM.from_config(core.config, core=core)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args={"below": [10]})
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    assert max(output.outputs[0].token_ids) < 10
    params.extra_args = {"under": ["ten"]}
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"'under' cannot read \['six'\]"):
        llm.generate(prompt, SamplingParams(extra_args={"under": ["six"]}), use_tqdm=False)
    for wrong in ({"above": [1]}, {"below": []}, {"below": [1, 2]}, {"below": ["x"]}):
        with pytest.raises(InvalidRequestError, match="extra_args"):
            llm.generate(prompt, SamplingParams(extra_args=wrong), use_tqdm=False)
    with pytest.raises(ConfigError, match="logits_processors"):
        LLM.from_config(core.config, core=core, logits_processors=PROCESSORS)
    with pytest.raises(ConfigError, match="different names"):
        LLM(core.config.model.model, **engines.SMALL, logits_processors=[PROCESSORS[0], PROCESSORS[0]])


def test_processors_are_imported_by_name(monkeypatch, tmp_path):
    (tmp_path / "breaks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_processors([f"{__name__}:Below", f"{__name__}:UNSEEN", PROCESSORS[0]])
    assert [processor.name for processor in loaded] == ["below", "unseen", "below"]
    wrong = {
        f"{__name__}:NAME": "but of type str",
        f"{__name__}:nothing": "has no attribute",
        "nowhere:X": "PYTHONPATH",
        "breaks:X": "ZeroDivisionError",
    }
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            LLM(str(goldens.golden(NAME).directory), logits_processors=[name], **engines.SMALL)
    with pytest.raises(ConfigError, match="must be a list of module:Name"):
        EngineConfig.from_options(logits_processors=("module",))


@pytest.mark.slow
def test_processed_logprobs_of_an_llm_with_processors(dense):
    """Taken after processors, temperature and top-k: what was drawn from."""
    prompt = goldens.golden(NAME).results[0].prompt
    params = SamplingParams(
        temperature=0.5,
        top_k=5,
        seed=3,
        max_tokens=6,
        ignore_eos=True,
        logprobs=6,
        prompt_logprobs=0,
        extra_args={"below": [64]},
    )
    model = str(goldens.golden(NAME).directory)
    options = {**engines.SMALL, "logprobs_mode": "processed_logprobs", "logits_processors": (f"{__name__}:Below",)}
    with LLM.from_config(EngineConfig.from_options(model=model, **options)) as llm:
        output = llm.generate(prompt, params, use_tqdm=False)[0]
    tokens = output.outputs[0].token_ids
    raw = dense(prompt + tokens)
    for at, expected in zip(output.outputs[0].logprobs, raw[len(prompt) - 1 : -1], strict=True):
        scaled = np.where(np.arange(128) < 64, expected / 0.5, -np.inf)
        kept = np.where(scaled >= np.sort(scaled)[-5], scaled, -np.inf)
        kept -= np.log(np.exp(kept).sum())
        for token, found in at.items():
            np.testing.assert_allclose(found.logprob, kept[token], **TOLERANCE)
    # A prompt is not drawn from anything: its logprobs are the model's.
    for at, expected, token in zip(output.prompt_logprobs[1:], raw, prompt[1:], strict=False):
        np.testing.assert_allclose(at[token].logprob, expected[token], **TOLERANCE)
