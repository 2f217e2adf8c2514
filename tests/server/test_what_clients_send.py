"""Fields, values and paths as clients of OpenAI's and vLLM's APIs send them."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.sampling_params import READS_ITSELF
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.client import Client
from tests.server.conftest import options

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"model": None},
        {"stop": [f"s{i}" for i in range(64)]},
        {"temperature": 7.5},
        {"length_penalty": 1.0, "use_beam_search": False, "best_of": 1},
        {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        {"messages": [{"role": role, "content": "hi"} for role in ("ipython", "critic", "user")]},
        {"messages": [USER, {"role": "tool", "tool_call_id": "1", "content": None}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1"}]},
        {"max_tokens": None, "guided_json": None},
        {"chat_id": "x", "background_tasks": {}},
        {"thinking_token_budget": -1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_clients_send_is_taken(client: Client, fields: Mapping[str, Any]) -> None:
    reply = client.post(CHAT, {"messages": [USER], **fields})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("path", "fields", "param", "text"),
    [
        (CHAT, {"stop": ["s"] * 65}, "stop", "at most 64 are possible (--max-stop-strings)"),
        (CHAT, {"max_tokns": 5}, "max_tokns", "did you mean max_tokens?"),
        (CHAT, {"repeat_penalty": 1.2}, "repeat_penalty", "did you mean repetition_penalty?"),
        (COMPLETIONS, {"prompts": ["a"]}, "prompts", "did you mean prompt?"),
        (CHAT, {"max_tokens": 500}, "max_tokens", "maximum context length is 200 tokens"),
        (CHAT, {"max_completion_tokens": 500, "stream": True}, "max_completion_tokens", "max_completion_tokens may be at most"),
        (CHAT, {"max_tokens": 500, "use_beam_search": True}, "max_tokens", "lower it"),
        (COMPLETIONS, {"max_tokens": 200}, "max_tokens", "max_tokens is 200, but the prompt has 3 tokens"),
        (COMPLETIONS, {"temperature": 1e9}, "temperature", "at most 1000000.0"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "does not read"),
        (CHAT, {"thinking_token_budget": 0}, "thinking_token_budget", "or limit max_tokens"),
        (CHAT, {"length_penalty": 2.0}, "length_penalty", "set use_beam_search"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(
    client: Client, path: str, fields: Mapping[str, Any], param: str, text: str
) -> None:
    reply = client.post(path, {"prompt": "hi"} | fields if path == COMPLETIONS else {"messages": [USER], **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert text in error["message"]


def test_an_answer_may_fill_the_context_and_a_cut_prompt_leaves_room_for_it(client: Client) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 197}),
        (COMPLETIONS, {"prompt": "one " * 300, "max_tokens": 150, "truncate_prompt_tokens": -1}),
        (CHAT, {"messages": [{"role": "user", "content": "one " * 300}], "max_tokens": 150, "truncate_prompt_tokens": -1}),
    ):
        reply = client.post(path, fields)
        assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == 50


def test_misspelt_fields_can_be_ignored(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    with Client(create_app(engine, options(ignore_unknown_fields=True))) as client, caplog.at_level(logging.INFO, "jaxllm"):
        for _ in range(2):
            assert client.chat(max_tokns=5).status_code == 200
    assert caplog.text.count("'max_tokns'") == 1


def test_prompt_logprobs_are_null_unless_they_are_asked_for(client: Client) -> None:
    assert client.chat().json()["prompt_logprobs"] is None
    assert client.complete().json()["choices"][0]["prompt_logprobs"] is None
    assert client.complete(prompt_logprobs=1, prompt="hi there").json()["choices"][0]["prompt_logprobs"][0] is None


def test_arguments_of_a_processor_may_be_a_single_number(
    core: FakeEngineCore, engine: AsyncLLM, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.input_processor, "processor_arguments", {"sway": 1})
    for value in (2, 2.5, [2.0]):
        assert client.chat(vllm_xargs={"sway": value}).status_code == 200
    assert [request.sampling_params.extra_args for request in core.requests[-3:]] == [
        {"sway": [2]},
        {"sway": [2.5]},
        {"sway": [2.0]},
    ]


def test_texts_reach_a_processor_and_refusals_name_the_field_that_was_sent(
    core: FakeEngineCore, engine: AsyncLLM, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.input_processor, "processor_arguments", {"sway": 1, "tone": READS_ITSELF})
    for value, given in (("calm", ["calm"]), (["calm", 2], ["calm", 2])):
        assert client.complete(vllm_xargs={"tone": value}).status_code == 200
        assert core.requests[-1].sampling_params.extra_args == {"tone": given}
    for ask in (client.chat, client.complete):
        for xargs, told in (
            ({"sway": "calm"}, "vllm_xargs['sway'] is 'calm'"),
            ({"no": 1}, "vllm_xargs names 'no', which is no"),
        ):
            error = ask(vllm_xargs=xargs).json()["error"]
            assert told in error["message"] and error["param"] == "vllm_xargs"
            assert ask(extra_args=xargs).json()["error"]["param"] == "extra_args"


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax", "normalize"])
def test_the_activation_of_vectors_has_older_names(core: FakeEngineCore, client: Client, name: str) -> None:
    reply = client.post("/v1/embeddings", {"input": "hi", name: False})
    assert reply.status_code == 200, reply.text
    params = core.requests[-1].pooling_params
    assert params is not None and params.use_activation is False


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/v1/model", 404, "did you mean /v1/models?"),
        ("GET", "/zzz", 404, "there is nothing at /zzz; there is /v1/chat/completions, "),
        ("POST", "/sleep", 404, "only with --enable-dev-endpoints"),
        ("GET", "/v1/chat/completions", 405, "does not take GET; use POST"),
        ("GET", "/v1/models/llama", 404, "this server has 'm'"),
    ],
)
def test_a_wrong_path_is_told_what_there_is(client: Client, method: str, path: str, status: int, text: str) -> None:
    reply = client.request(method, path)
    assert reply.status_code == status
    assert text in reply.json()["error"]["message"]


def test_metrics_need_no_key(engine: AsyncLLM) -> None:
    with Client(create_app(engine, options(api_key=["secret"]))) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/models").status_code == 401
