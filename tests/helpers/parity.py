"""Runs the prompts of a golden through an engine and compares what comes back with what transformers computed."""

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest
from tests.helpers import engines, goldens

NUM_TOKENS = 64


def requests_of(name: str, **params) -> list[EngineCoreRequest]:
    """All prompts of a golden at once: more than there are rows, of lengths 1 to 40."""
    return [
        engines.request(str(i), result.prompt, max_tokens=NUM_TOKENS, **params)
        for i, result in enumerate(goldens.golden(name).results)
    ]


def check(name: str, core: EngineCore, *, prompt_logprobs: bool = True) -> dict[str, engines.Answer]:
    """Run a golden's prompts and compare."""
    requests = requests_of(name, prompt_logprobs=0) if prompt_logprobs else requests_of(name)
    answers = engines.run(core, requests)
    for i, result in enumerate(goldens.golden(name).results):
        answer = answers[str(i)]
        assert len(result.tokens) == NUM_TOKENS
        assert answer.tokens == result.tokens, f"prompt {i} of {len(result.prompt)} tokens"
        if prompt_logprobs:
            found = answer.prompt_logprobs
            assert found is not None and found.token_ids[:, 0].tolist() == result.prompt[1:]
            np.testing.assert_allclose(found.logprobs[:, 0], result.prompt_logprobs, rtol=0, atol=1e-4)
    return answers
