"""Every sampling parameter that requests may set reaches the engine, from each API that takes it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.sampling_params import FIELDS, IN_REQUESTS, SamplingParams
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.thinking import ThinkingBudget
from server.app import create_app
from server.openapi import bodies
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE, write_tokenizer
from tests.server.client import Client
from tests.server.conftest import options

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
    "thinking_token_budget": "reaches the engine counted from the prompt",
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


def test_every_number_of_every_body_may_come_as_a_text() -> None:
    def numbers(schema: Any) -> Iterator[str]:
        if isinstance(schema, Mapping) and schema.get("type") != "json-or-python":
            if schema.get("type") in ("int", "float"):
                yield repr(schema)
            for name, value in schema.items():
                yield from numbers(value) if name not in ("config", "metadata") else ()
        elif isinstance(schema, (list, tuple)):
            for value in schema:
                yield from numbers(value)

    for body in bodies():
        assert list(numbers(body.__pydantic_core_schema__)) == [], body


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, FakeEngineCore]]:
    """A model whose chat template opens its thinking, which tokens of their own open and close."""
    template = CHAT_TEMPLATE.replace("<|assistant|>", "<|assistant|><think>")
    directory = write_tokenizer(tmp_path_factory.mktemp("thinks"), chat_template=template, added_tokens=("<think>", "</think>"))
    core = fake_core(directory, max_model_len=2000)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        yield client, core


@pytest.mark.parametrize("path", BODIES)
def test_a_thinking_budget_reaches_the_engine_counted_from_the_prompt(
    thinker: tuple[Client, FakeEngineCore], path: str
) -> None:
    client, core = thinker
    start, end = (load_tokenizer(Path(core.config.model.model)).convert_token_to_id(text) for text in ("<think>", "</think>"))
    for budget, wanted in ((5, 5), (10**30, 2000), (-1, None), (None, None)):
        reply = client.post(path, {**BODIES[path], "thinking_token_budget": budget})
        assert reply.status_code == 200, reply.text
        found = core.requests[-1].thinking_budget
        assert found == (wanted and ThinkingBudget(wanted, start, (end,), is_open=path != "/v1/completions"))
        assert core.requests[-1].sampling_params.thinking_token_budget is None
    if path == "/v1/messages":
        for given, num_tokens in (({}, 1024), ({"thinking_token_budget": 5}, 5)):
            thinking = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}, **given}
            reply = client.post(path, {**BODIES[path], **thinking})
            assert reply.status_code == 200, reply.text
            assert core.requests[-1].thinking_budget == ThinkingBudget(num_tokens, start, (end,), is_open=True)
    reply = client.post(path, {**BODIES[path], "thinking_token_budget": 5, "allowed_token_ids": [start]})
    assert reply.status_code == 400 and f"lacks {end}, the token that ends the thinking" in reply.json()["error"]["message"]
