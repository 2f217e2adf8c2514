"""Requests of every kind, which an engine on several devices must answer as one device does, whatever happens to its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llguidance import LLMatcher

from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.request import EngineCoreRequest, FinishReason, Grammar
from tests.helpers import engines
from tests.helpers.engines import Answer

NUM_TOKENS = 24
SMALL_LETTERS = Grammar(LLMatcher.grammar_from_lark("start: /[a-z]{30,60}/"))
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}

Requests = Callable[[], list[EngineCoreRequest]]
Answers = Mapping[str, Answer]


def requests(prompts: Sequence[list[int]]) -> list[EngineCoreRequest]:
    """More than run at a time, of six prompts."""
    grammar = engines.request("grammar", prompts[5], max_tokens=NUM_TOKENS, logprobs=2, **SEEDED)
    penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.2, **SEEDED}
    return [
        engines.request("greedy", prompts[0], max_tokens=NUM_TOKENS),
        engines.request("seeded", prompts[1], max_tokens=NUM_TOKENS, **SEEDED),
        engines.request("logprobs", prompts[2], max_tokens=NUM_TOKENS, logprobs=2, **SEEDED),
        replace(grammar, grammar=SMALL_LETTERS),
        engines.request("penalties", prompts[3], max_tokens=NUM_TOKENS, **penalties),
        engines.request("prompt logprobs", prompts[4] * 3, max_tokens=NUM_TOKENS, prompt_logprobs=1),
        engines.request("one token", prompts[0] * 2, max_tokens=1),
        engines.pooling_request("vector", prompts[1]),
    ]


def check(found: Answers, expected: Answers) -> None:
    """Tokens are equal, logprobs and vectors close."""
    for name, answer in found.items():
        wanted = expected[name]
        assert answer.tokens == wanted.tokens, name
        pairs = [(answer.prompt_logprobs, wanted.prompt_logprobs)]
        if wanted.logprobs:  # with drafts, several tokens come at a time
            pairs.append((answer.token_logprobs, wanted.token_logprobs))
        for got, want in pairs:
            if want is not None:
                np.testing.assert_array_equal(got.token_ids, want.token_ids)
                np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
        if wanted.pooled is not None:
            np.testing.assert_allclose(answer.pooled, wanted.pooled, atol=1e-4)


def check_twice(core: EngineCore, requests: Requests, expected: Answers, **options: Any) -> None:
    """With these options of the scheduler; the second time from cached prefixes. With few blocks requests are preempted."""
    engines.reschedule(core, **options)
    check(engines.run(core, requests()), expected)
    is_short = "num_blocks" in options
    assert (core.stats().num_preemptions > 0) == is_short
    before = core.stats().prefix_cache_hits
    check(engines.run(core, requests()), expected)
    assert core.stats().prefix_cache_hits > before or is_short


def check_after_failed_steps(core: EngineCore, requests: Requests, expected: Answers, faults: str) -> None:
    with injected(faults):
        check(engines.run(core, requests()), expected)
    assert core.stats().num_retried_steps > 0
    core.check_integrity()


def check_after_sleep(core: EngineCore, requests: Requests, expected: Answers, level: int) -> None:
    core.add_request(requests()[0])
    core.step()
    core.sleep(level)
    assert all(not runner.params and not runner.caches for runner in getattr(core.runner, "stages", [core.runner]))
    assert {output.finish_reason for output in core.step()} == {FinishReason.ABORT}
    core.wake_up()
    check(engines.run(core, requests()), expected)
