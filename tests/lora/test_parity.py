"""Whole engines with adapters against the model with the same adapter merged into its weights, computed by dense attention."""

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.engine.core import EngineCore
from tests.helpers import engines, goldens, peft_files

LENGTHS = (12, 1, 17, 33)
NUM_TOKENS = 16


def add(core: EngineCore, name: str, directory: Path) -> None:
    number = core.add_adapter(name, str(directory))
    while (found := core.adapter_state(number)).state == "loading":
        time.sleep(0.002)
    assert found.state == "ready", found.error


def check(model: Path, adapter: Path | None, answers: dict[str, list[engines.Answer]], prompts, directory: Path) -> None:
    """Compare greedy tokens and all logprobs."""
    if adapter is not None:
        model = peft_files.merged(model, adapter, directory)
    config, state = goldens.load(model)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer.tokens]
        logits = goldens.logits(config, state, tokens[:-1], pad_to=64)
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
        split = len(prompt) - 1
        assert logits[split:].argmax(-1).tolist() == answer.tokens
        np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], logprobs[split:], atol=2e-4)
        if split:
            np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], logprobs[:split], atol=2e-4)


def run(core: EngineCore, names: list[str | None], prompts) -> dict[str | None, list[engines.Answer]]:
    """Every prompt with every adapter, all at once."""
    requests = []
    for name in names:
        for i, prompt in enumerate(prompts):
            request = engines.request(f"{name} {i}", prompt, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0)
            requests.append(dataclasses.replace(request, adapter=name))
    answers = engines.run(core, requests)
    return {name: [answers[f"{name} {i}"] for i in range(len(prompts))] for name in names}
