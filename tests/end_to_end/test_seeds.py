"""A seeded request gives the same tokens in any batch, and after preemption."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.helpers import engines

pytestmark = pytest.mark.slow

PROMPT = [17, 4, 99, 23, 56, 2, 81]
TARGETS = {
    "random": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234},
    "full": {"temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": -5},
    "min_p": {"temperature": 0.8, "min_p": 0.02, "seed": 2**62},
    "top_n_sigma": {"temperature": 2.0, "top_n_sigma": 1.5, "seed": 77},
}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def core():
    core = engines.make_core("llama_gqa", max_num_seqs=68, decode_buckets=(4, 68), max_num_batched_tokens=112)
    yield core
    core.shutdown()


def target(kind: str):
    return engines.request(kind, PROMPT, max_tokens=NUM_TOKENS, **TARGETS[kind])


@pytest.fixture(scope="module")
def alone(core):
    """The tokens of each target, run alone and without async scheduling."""
    tokens = {}
    for kind in TARGETS:
        engines.reschedule(core, async_scheduling=False)
        tokens[kind] = engines.run(core, [target(kind)])[kind].tokens
    return tokens


def strangers(count: int, seed: int):
    """Requests of every kind of sampling, some with the same beginnings as the targets."""
    rng = np.random.default_rng(seed)
    kinds = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"temperature": 1.3, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.5, "top_n_sigma": 1.0},
        {"temperature": 1.0, "logprobs": 2},
        {"logprob_token_ids": [5, 9]},
    ]
    for i in range(count):
        prompt = rng.integers(128, size=rng.integers(1, 40)).tolist()
        yield engines.request(
            f"stranger {i}",
            PROMPT + prompt if i % 7 == 0 else prompt,
            max_tokens=int(rng.integers(1, 60)),
            **{**kinds[i % len(kinds)], "seed": i},
        )


def test_alone_with_async_scheduling(core, alone):
    for kind in TARGETS:
        engines.reschedule(core)
        assert engines.run(core, [target(kind)])[kind].tokens == alone[kind]
    assert len({tuple(tokens) for tokens in alone.values()}) == len(TARGETS)
    assert all(len(set(tokens)) > 10 for tokens in alone.values()), "these draws would show little"


def test_logprobs_change_no_token(core, alone):
    engines.reschedule(core)
    for kind in TARGETS:
        request = engines.request(kind, PROMPT, max_tokens=NUM_TOKENS, **TARGETS[kind], logprobs=2)
        assert engines.run(core, [request])[kind].tokens == alone[kind]


def test_among_64_strangers(core, alone):
    engines.reschedule(core)
    crowd = list(strangers(64, seed=1))
    for i, kind in enumerate(TARGETS):
        crowd.insert(20 * (i + 1), target(kind))
    answers = engines.run(core, crowd)
    assert core.stats().num_preemptions == 0
    for kind in TARGETS:
        assert answers[kind].tokens == alone[kind], kind


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_after_preemption(core, alone, async_scheduling):
    engines.reschedule(core, async_scheduling=async_scheduling, num_blocks=24, max_num_batched_tokens=70)
    crowd = [*strangers(10, seed=2), *map(target, TARGETS), *strangers(0, seed=3)]
    answers = engines.run(core, crowd)
    for kind in TARGETS:
        assert answers[kind].tokens == alone[kind], kind
    assert any(answers[kind].num_preemptions > 0 for kind in ("random", "min_p")) and answers["full"].num_preemptions > 0


def test_n_answers_with_a_seed(core):
    engines.reschedule(core)
    llm = LLM.from_config(core.config, core=core)
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    one, two = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    answers = [answer.token_ids for answer in one.outputs]
    assert answers == [answer.token_ids for answer in two.outputs]
    assert len(set(map(tuple, answers))) == 3, "each of the n answers has a draw of its own"
    single = SamplingParams(temperature=1.0, seed=8, max_tokens=12, ignore_eos=True)
    assert llm.generate(PROMPT, single, use_tqdm=False)[0].outputs[0].token_ids == answers[1]


def test_without_a_seed_answers_differ(core):
    engines.reschedule(core)
    llm = LLM.from_config(core.config, core=core)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_an_engine_with_a_seed_repeats_itself(core, monkeypatch):
    def run(seed):
        engines.reschedule(core)
        monkeypatch.setattr(core, "config", core.config.replace(seed=seed))
        llm = LLM.from_config(core.config, core=core)
        params = SamplingParams(n=2, temperature=1.0, max_tokens=12, ignore_eos=True)
        return [answer.token_ids for output in llm.generate([PROMPT] * 2, params, use_tqdm=False) for answer in output.outputs]

    first = run(1)
    assert len(set(map(tuple, first))) == 4
    assert run(1) == first != run(2)
