"""Engines with adapters, and models with the same adapters merged into their weights, computed by dense attention."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.engine.core import EngineCore
from tests.helpers import engines, goldens

NUM_TOKENS = 16
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(128, size=length).tolist() for length in (12, 1, 40)]
Answers = Mapping[str | None, Sequence[engines.Answer]]


def add(core: EngineCore, name: str, directory: Path) -> None:
    number = core.add_adapter(name, str(directory))
    while (found := core.adapter_state(number)).state == "loading":
        time.sleep(0.002)
    assert found.state == "ready", found.error


def run(core: EngineCore, names: Sequence[str | None], **params: Any) -> Answers:
    """Every prompt with every adapter, all at once."""
    requests = [
        dataclasses.replace(engines.request(f"{name} {i}", prompt, max_tokens=NUM_TOKENS, logprobs=0, **params), adapter=name)
        for i, prompt in enumerate(PROMPTS)
        for name in names
    ]
    answers = engines.run(core, requests)
    return {name: [answers[f"{name} {i}"] for i in range(len(PROMPTS))] for name in names}


def check(model: Path, answers: Sequence[engines.Answer]) -> None:
    """Compare greedy tokens and the logprobs of all with a model's."""
    config, state = goldens.load(model)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = [*prompt, *answer.tokens]
        logits = goldens.logits(config, state, tokens[:-1], pad_to=64)
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
        start = len(prompt) - 1
        assert len(answer.tokens) == NUM_TOKENS and logits[start:].argmax(-1).tolist() == answer.tokens
        np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], expected[start:], atol=2e-4)
        if start:
            assert answer.prompt_logprobs is not None
            np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], expected[:start], atol=2e-4)
