"""Fields, values and paths as clients of OpenAI's and vLLM's APIs send them."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.log import info_once
from jaxllm.sampling_params import READS_ITSELF
from server.app import create_app
from server.ignored import log_once
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.client import Client, events
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
        {"messages": [{"role": "system"}, {"role": "user"}]},
        {"tools": [{"type": "function", "function": {"name": name}} for name in ("get weather", "get weather", "n" * 128)]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_clients_send_is_taken(client: Client, fields: Mapping[str, Any]) -> None:
    reply = client.post(CHAT, {"messages": [USER], **fields})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs has 'enable_thinking', which has no"),
        (CHAT, {"documents": [{"text": "x"}]}, "documents have no effect"),
        (CHAT, {"verbosity": "low"}, "verbosity has no effect"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity has no effect"),
        (CHAT, {"function_call": "none"}, "function_call has no effect"),
        (CHAT, {"functions": []}, "functions has no effect"),
        ("/tokenize", {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params has no effect"),
        (COMPLETIONS, {"priority": 7}, "priority of requests has no effect"),
    ],
)
def test_what_has_no_effect_is_taken_and_logged_once(
    client: Client, caplog: pytest.LogCaptureFixture, path: str, fields: Mapping[str, Any], text: str
) -> None:
    log_once.cache_clear()
    info_once.cache_clear()
    prompt = {COMPLETIONS: {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": [USER]})
    with caplog.at_level(logging.INFO, "jaxllm"):
        for _ in range(2):
            reply = client.post(path, {**prompt, **fields})
            assert reply.status_code == 200, reply.text
    assert caplog.text.count(text) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_numbers_and_booleans_are_taken_as_clients_serialise_them(client: Client, core: FakeEngineCore, path: str) -> None:
    prompt = {COMPLETIONS: {"prompt": [5.0, 6.0]}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": [USER]})
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    reply = client.post(
        path,
        {
            **prompt,
            limit: 8.0,
            "temperature": "0.5",
            "top_k": "7",
            "seed": "3",
            "stream": "false",
            "ignore_eos": "True",
            "stop_token_ids": ["30", 31.0],
            "logit_bias": {"30": "1"},
            "repetition_detection": {"max_pattern_size": "3", "min_count": 2.0},
            "vllm_xargs": {},
            "priority": "0",
            "timeout": "60",
        },
    )
    assert reply.status_code == 200, reply.text
    params = core.requests[-1].sampling_params
    assert params is not None
    assert (params.max_tokens, params.temperature, params.top_k, params.seed, params.ignore_eos) == (8, 0.5, 7, 3, True)
    assert (params.stop_token_ids, params.logit_bias) == ([30, 31], {30: 1.0})
    assert params.repetition_detection == {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    for fields, param in (({"top_k": 7.5}, "top_k"), ({"seed": "x"}, "seed"), ({"logit_bias": {"30": True}}, "logit_bias")):
        refused = client.post(path, {**prompt, limit: 8, **fields})
        assert refused.status_code == 400 and refused.json()["error"].get("param", param) == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        ({}, ""),
        ({"messages": [USER, {"role": "assistant", "content": "Sure, "}]}, "Sure, "),
        ({"messages": [USER], "add_generation_prompt": False}, "hi"),
        ({"messages": [USER, {"role": "assistant", "content": "So "}], "continue_final_message": True}, "So "),
    ],
)
def test_a_chat_echoes_the_last_message_if_the_answer_is_of_the_same_role(
    client: Client, fields: Mapping[str, Any], echoed: str, stream: bool
) -> None:
    reply = client.chat(echo=True, stream=stream, **fields)
    if stream:
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in events(reply))
    else:
        text = reply.json()["choices"][0]["message"]["content"]
    assert text == echoed + "one two three"


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_a_text_that_max_tokens_cuts_inside_a_character_ends_before_it(
    client: Client, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    ids = client.app.state.context.tokenizer.encode("a😀b", add_special_tokens=False)
    assert len(ids) == 5, "the middle character has three tokens"
    monkeypatch.setattr(core, "_script", lambda request: ids)
    asked = {"max_tokens": num_tokens, "logprobs": 1, "return_token_ids": True}
    whole = client.complete(**asked).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(client.complete(**asked, stream=True))]
    assert whole["text"] == "".join(chunk["text"] for chunk in chunks) == ("a😀" if num_tokens == 4 else "a")
    assert whole["token_ids"] == ids[:num_tokens] == [id for chunk in chunks for id in chunk["token_ids"]]
    assert len(whole["logprobs"]["tokens"]) == num_tokens


def test_texts_that_look_like_numbers_stay_texts(client: Client, core: FakeEngineCore) -> None:
    assert client.complete(prompt=["1", "2"], stop=["3"], user="4").status_code == 200
    assert [request.sampling_params.stop for request in core.requests[-2:]] == [["3"], ["3"]]  # type: ignore[union-attr]


def test_a_tool_call_of_the_history_with_cut_arguments_ends_no_conversation(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    cut = {"name": "f", "arguments": '{"path": "/a/b'}
    chat = [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": cut}]}]
    item = {"type": "function_call", "call_id": "1", **cut}
    result = {"type": "function_call_output", "call_id": "1", "output": "no such file"}
    for path, fields in (
        (CHAT, {"messages": [*chat, {"role": "tool", "tool_call_id": "1", "content": "no such file"}]}),
        ("/v1/responses", {"input": [USER, item, result]}),
        ("/api/chat", {"messages": [*chat, {"role": "tool", "content": "no such file"}]}),
    ):
        with caplog.at_level(logging.DEBUG, "jaxllm"):
            reply = client.post(path, fields)
        assert reply.status_code == 200, reply.text
    assert caplog.text.count("message 1 has a tool call whose arguments are no JSON object: taken as {}") == 3


@pytest.mark.parametrize(
    ("path", "fields", "param", "text"),
    [
        (CHAT, {"stop": ["s"] * 65}, "stop", "at most 64 are possible (--max-stop-strings)"),
        (CHAT, {"max_tokns": 5}, "max_tokns", "did you mean max_tokens?"),
        (CHAT, {"repeat_penalty": 1.2}, "repeat_penalty", "did you mean repetition_penalty?"),
        (COMPLETIONS, {"prompts": ["a"]}, "prompts", "did you mean prompt?"),
        (CHAT, {"max_tokens": 201}, "max_tokens", "maximum context length is 200 tokens"),
        (CHAT, {"max_completion_tokens": 500, "stream": True}, "max_completion_tokens", "leave it out for as many as fit"),
        (CHAT, {"max_tokens": 500, "use_beam_search": True}, "max_tokens", "lower the limit"),
        (COMPLETIONS, {"max_tokens": 201}, "max_tokens", "201 output tokens are requested"),
        (COMPLETIONS, {"temperature": 1e9}, "temperature", "at most 1000000.0"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "leave it out"),
        (CHAT, {"best_of": 2}, "best_of", "use n and choose among the answers"),
        (CHAT, {"function_call": "auto"}, "function_call", "use tool_choice"),
        (CHAT, {"guided_choice": []}, "guided_choice", "use structured_outputs {'choice': …}"),
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


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_is_cut_to_what_the_prompt_leaves(
    client: Client, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch, path: str, limit: str, stream: bool
) -> None:
    monkeypatch.setattr(core, "_script", lambda request: [70] * 1000)
    prompt = {COMPLETIONS: {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": [USER]})
    reply = client.post(path, {**prompt, limit: 200, "stream": stream})
    assert reply.status_code == 200, reply.text
    request = core.requests[-1]
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 200 - len(request.prompt_token_ids)
    refused = client.post(path, {**prompt, limit: 201, "stream": stream})
    error = refused.json()["error"]
    assert refused.status_code == 400 and "201 output tokens are requested" in error["message"]
    assert error.get("param", limit) == limit, "Anthropic's errors have no param"


def test_a_cut_prompt_leaves_room_for_the_answer(client: Client) -> None:
    for path, fields in (
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
    for value in (2, 2.5, ["2"]):
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
