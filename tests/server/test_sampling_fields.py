"""Every sampling parameter that requests may set reaches the engine, from each API that takes it."""

from typing import Any

import pytest

from jaxllm.sampling_params import FIELDS, IN_REQUESTS, SamplingParams
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.client import Client

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 7},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 7},
    "/v1/responses": {"input": "hi", "max_output_tokens": 7},
    "/v1/messages": {"messages": USER, "max_tokens": 7},
}
VALUES: dict[str, Any] = {
    "stop": ["x"],
    "bad_words": ["x"],
    "logit_bias": {"5": 1.5},
    "extra_args": {},
    "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2},
}
"""For fields whose values are more than numbers, switches and token ids."""
ELSEWHERE = {
    "n": "each answer is a request of its own",
    "structured_outputs": "reaches the engine compiled",
    "logprob_token_ids": "the chat API takes it with logprobs",
}
"""Fields whose way other tests show."""


def value_of(name: str) -> Any:
    plain = {bool: not FIELDS[name].default, int: 3, float: 0.5, list[int]: [4, 5]}
    return VALUES[name] if name in VALUES else plain[FIELDS[name].type]


@pytest.mark.parametrize("path", BODIES)
def test_every_parameter_reaches_the_engine(client: Client, core: FakeEngineCore, path: str) -> None:
    takes_all = path in ("/v1/completions", "/v1/chat/completions")
    for name in IN_REQUESTS.keys() - ELSEWHERE:
        if not takes_all and not IN_REQUESTS[name].passed_on:
            continue
        value = value_of(name)
        reply = client.post(path, {**BODIES[path], name: value})
        assert reply.status_code == 200, reply.text
        wanted = getattr(SamplingParams(**{name: value}), name)
        assert getattr(core.requests[-1].sampling_params, name) == wanted, name
