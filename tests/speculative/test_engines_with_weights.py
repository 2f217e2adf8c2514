"""Whole engines whose drafters have weights: the same tokens as without, and drafts that are the drafter's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.hub import resolve_model
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.speculative.control import AdaptiveControl
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers import engines, goldens
from tests.speculative.by_hand import MAX_LENGTH, HiddenStates, target_hidden_states
from tests.speculative.checkpoints import (
    CONFIG_3,
    TARGET,
    EagleOracle,
    head_tensors,
    write,
)

RESULTS = goldens.golden(TARGET.name).results
PROMPTS = [result.prompt for result in RESULTS]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 20}


@pytest.fixture(autouse=True)
def _drafts_in_all_steps(monkeypatch):
    """However long they take on this machine."""
    monkeypatch.setattr(AdaptiveControl, "note_seconds", lambda *_: None)


def requests(**params: Any):
    return [engines.request(str(i), prompt, seed=i, **{**SAMPLED, **params}) for i, prompt in enumerate(PROMPTS)]


def tokens_of(answers) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def count_steps(core: EngineCore, wanted) -> tuple[dict[str, list[int]], int]:
    steps = []
    answers = engines.run(core, wanted, after_step=lambda step, _: steps.append(step))
    return tokens_of(answers), len(steps)


def compare_drafts(core: EngineCore, drafts_of: Callable[[list[int]], list[int]]) -> Callable[..., None]:
    """A check to call after each step of an engine with one step in flight: its rows must have the drafts that follow their tokens."""
    num_compared = 0

    def compare(step: int, answers: dict[str, engines.Answer]) -> None:
        nonlocal num_compared
        found = np.asarray(core.runner.row_arrays.of_features["drafts"].draft_NK)
        for name, row in core.runner.rows[0].by_request.items():
            drafts, answer = found[row.index].tolist(), answers[name]
            tokens = PROMPTS[int(name)] + answer.tokens
            if answer.tokens and answer.finish_reason is None and drafts[0] != NO_DRAFT and len(tokens) < MAX_LENGTH - 4:
                assert drafts == drafts_of(tokens), f"request {name} after step {step}"
                num_compared += 1

    compare.done = lambda: num_compared  # type: ignore[attr-defined]
    return compare


def run_and_compare(core: EngineCore, drafts_of: Callable[[list[int]], list[int]], **params: Any) -> dict[str, list[int]]:
    engines.reschedule(core, max_in_flight=1)
    compare = compare_drafts(core, drafts_of)
    answers = engines.run(core, requests(**params), after_step=compare)
    assert compare.done() > 20  # type: ignore[attr-defined]
    return tokens_of(answers)


@pytest.mark.slow
def test_drafts_of_an_eagle_head_in_an_engine_of_two_devices(tmp_path):
    weights = head_tensors(is_third=True)
    options = {"method": "eagle3", "model": str(write(tmp_path / "head", CONFIG_3, weights)), "num_speculative_tokens": 2}
    core = engines.make_core(TARGET.name, speculative_config=options, tensor_parallel_size=2)
    oracle, states = EagleOracle(weights, CONFIG_3), hidden_states(core)
    found = run_and_compare(core, lambda tokens: oracle.drafts(tokens, states, 2), temperature=0.0)
    assert found == {str(i): result.tokens[:20] for i, result in enumerate(RESULTS)}
    core.shutdown()


def hidden_states(core: EngineCore) -> HiddenStates:
    return target_hidden_states(*goldens.load(core.model_dir), core.runner.shapes.functions.latest.drafter.feature_layers)


@pytest.mark.slow
def test_the_demo_models_eagle_head_is_mostly_right():
    """Tokens per step are about those of docs/DEMO_MODEL.md."""
    demo = resolve_model("demo")
    options = {"method": "eagle3", "model": str(demo.parent / "demo_eagle3"), "num_speculative_tokens": 4}
    one_row = {"max_num_seqs": 1, "decode_buckets": (1,), "max_num_batched_tokens": 32, "token_buckets": (32,)}
    core = engines.make_core(TARGET.name, model=str(demo), speculative_config=options, **one_row)
    engines.reschedule(core, max_in_flight=1)
    prompts = ["def fibonacci(n):", "class Stack:\n    def push(self, item):\n", "import os\n\n\ndef list_files(path):\n"]
    num_steps = 0
    for text in prompts:
        prompt = load_tokenizer(demo).encode(text)
        alone = engines.run(core, [engines.request("0", prompt, max_tokens=64, num_speculative_tokens=0)])["0"].tokens
        found, steps = count_steps(core, [engines.request("0", prompt, max_tokens=64)])
        assert found["0"] == alone
        num_steps += steps - 1
    assert 63 * len(prompts) / num_steps >= 2.8
    core.shutdown()
