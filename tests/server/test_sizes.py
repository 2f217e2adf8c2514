"""Sizes of bodies are checked cheaply, before their values are validated."""

import time
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import server.app
import server.routes.adapters
from jaxllm.text.tokenizer import load_tokenizer
from server.body import parse_body
from server.errors import ApiError, without_leaks
from server.openapi import bodies
from server.prompts import PROBE_CHARACTERS, cut_text
from server.protocol.chat import ChatCompletionRequest
from server.protocol.common import RequestModel
from server.protocol.completions import CompletionRequest
from server.protocol.responses import ResponsesRequest
from server.protocol.sizes import BodyLimits, max_lengths
from server.routes.chat_batch import BatchChatCompletionRequest
from server.work import finish

MODULES = (server.app, server.routes.adapters)  # every body is known once these are imported

ELSEWHERE = {
    "by the context, after rendering and tokenizing in turns": "documents input instructions messages prompt system",
    "by the context and max_prompts_per_request": "data_1 data_2 items queries query text_1 text_2",
    "by the context": "token_ids tokens prompt_token_ids",
    "by the vocabulary": "allowed_token_ids",
    "in check_limits": "stop stop_sequences",
    "in check_template": "chat_template chat_template_kwargs",
    "as a structured output": "format",
    "as the bodies that they are, or SamplingParams": "chat_request completion_request sampling_params",
    "as names that are looked up": "language model name lora_name lora_path previous_response_id task tool_choice",
    "never: only the numbers of values and texts in a body": (
        "generate_responses is_3d_lora_weight keep_alive lora_int_id prompt_tokens reasoning_parser_kwargs token_offsets"
    ),
}
"""Where fields without a maximum length are bounded."""


def can_be_long(annotation: Any) -> bool:
    """Whether a value may be a text, a list or an object that is no model."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return can_be_long(parts[0])
    if origin in (typing.Union, types.UnionType):
        return any(map(can_be_long, parts))
    return origin in (list, dict) or annotation in (str, list, dict, Any)


def test_every_text_list_and_object_of_every_body_is_bounded_somewhere() -> None:
    known = {name for names in ELSEWHERE.values() for name in names.split()}
    models = [model for model in bodies() if issubclass(model, RequestModel)]
    assert len(models) > 15
    open_fields = {
        name
        for model in models
        for name, field in model.model_fields.items()
        if can_be_long(field.annotation) and name not in max_lengths(model)
    }
    assert open_fields == known


MAX_SECONDS = 0.5
"""More than ten times what a refusal takes."""


def least_seconds(call: Callable[[], object]) -> float:
    """CPU time of this thread in the quickest of three calls: other threads and garbage collection may slow one down."""
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return min(seconds)


HI = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("model", "fields", "param", "text"),
    [
        (ChatCompletionRequest, {"messages": [HI] * 30_000}, "messages", "30000 entries"),
        (
            ChatCompletionRequest,
            {"messages": [{**HI, "content": [{"type": "text", "text": ""}] * 30_000}]},
            "messages",
            "30001",
        ),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 12_000}]}, "messages", "12001"),
        (ChatCompletionRequest, {"messages": [HI], "documents": [{}] * 60_000}, "documents", "60000 entries"),
        (ChatCompletionRequest, {"messages": [HI], "allowed_token_ids": [5] * 500_000}, "allowed_token_ids", "vocabulary"),
        (BatchChatCompletionRequest, {"messages": [[HI], [HI] * 30_000]}, "messages", "30000 entries"),
        (ResponsesRequest, {"input": [HI] * 30_000}, "input", "30000 entries"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(60_000)}}, "logit_bias", "1024 are"),
        (CompletionRequest, {"prompt": "a", "extra_args": {str(i): {} for i in range(60_000)}}, "extra_args", "64 are"),
        (CompletionRequest, {"prompt": [5] * 2_200_000}, None, "2097152 numbers"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_validated(
    model: type[RequestModel], fields: dict[str, Any], param: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "model_validate", lambda body: pytest.fail("the body was validated"))
    raw, refused = msgspec.json.encode(fields), list[ApiError]()

    def refuse() -> None:
        with pytest.raises(ApiError) as caught:
            parse_body(raw, model, limits=BodyLimits(10_000, 10_000))
        refused.append(caught.value)

    assert least_seconds(refuse) < MAX_SECONDS
    assert all((error.status, error.param) == (400, param) and text in str(error) for error in refused)


def test_what_may_be_served_is_not_refused() -> None:
    commas = {"prompt": ',{["\\' * 100_000}
    assert parse_body(msgspec.json.encode(commas), CompletionRequest, limits=BodyLimits(100, 100)).prompt == commas["prompt"]
    many = {"messages": [HI] * 500, "allowed_token_ids": list(range(100)), "metadata": {"a": "b"}}
    assert len(parse_body(msgspec.json.encode(many), ChatCompletionRequest, limits=BodyLimits(500, 100)).messages) == 500


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_of_a_very_long_text_keeps_the_tokens_of_the_whole(side: str, served_directory: Path) -> None:
    tokenizer, text = load_tokenizer(served_directory), " ".join(map(str, range(60_000)))
    part = finish(cut_text(tokenizer, text, 500, side, 500))
    assert len(part) < PROBE_CHARACTERS < len(text)
    ids, whole = (tokenizer.encode(each, add_special_tokens=False) for each in (part, text))
    kept = slice(500) if side == "right" else slice(-500, None)
    assert ids[kept] == whole[kept]


def test_a_long_text_of_a_client_in_an_error_costs_little() -> None:
    assert least_seconds(lambda: without_leaks("/-" * 50_000)) < MAX_SECONDS
