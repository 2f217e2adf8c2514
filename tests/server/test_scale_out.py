"""Render, generate and derender give together what the plain routes give; what each refuses."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE, write_tokenizer
from tests.server.canned import SAID, WEATHER
from tests.server.client import Client, events
from tests.server.conftest import options

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("weather", "time")]


@pytest.fixture(scope="module")
def client(served_directory: Path) -> Iterator[Client]:
    """Answers are "one two three"."""
    core = fake_core(served_directory, max_model_len=200, scheduling_policy="priority")
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options(enable_scale_out=True))) as client:
        client.core = core  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Answers have reasoning, text and two calls."""
    directory = write_tokenizer(tmp_path_factory.mktemp("caller"), chat_template="{{ tools }}" + CHAT_TEMPLATE)
    given = options(tool_call_parser="hermes", reasoning_parser="deepseek_r1", enable_scale_out=True)
    with AsyncLLM(core=fake_core(directory, SAID, max_model_len=2000)) as engine, Client(create_app(engine, given)) as client:
        yield client


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def without_ids(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs each time."""
    text = json.dumps({name: value for name, value in reply.items() if name not in ("id", "created", "timings", "metrics")})
    for call in (call for choice in reply["choices"] for call in choice.get("message", {}).get("tool_calls") or ()):
        text = text.replace(call["id"], "call")
    return json.loads(text)


def token_by_token(chunks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chunks of one token each, as from an engine whose client reads each step."""
    for chunk in chunks:
        for choice in chunk["choices"] or [{}]:
            ids, logprobs = choice.get("token_ids", ()), choice.get("logprobs")
            for place, token_id in enumerate(ids):
                own: dict[str, Any] = {"index": choice["index"], "token_ids": [token_id]}
                own["logprobs"] = None if logprobs is None else {"content": [logprobs["content"][place]]}
                end = {name: choice[name] for name in ("finish_reason", "stop_reason")} if place == len(ids) - 1 else {}
                yield {**chunk, "choices": [{**own, **end}]}
            if not ids:
                yield chunk


@pytest.mark.parametrize("path", [GENERATE, ABORT, f"{CHAT}/render", f"{COMPLETIONS}/derender", "/v1/responses/render"])
def test_the_routes_are_there_with_the_option_alone(engine: AsyncLLM, path: str) -> None:
    with Client(create_app(engine, options())) as client:
        refused = client.post(path, {})
        assert refused.status_code == 404 and "--enable-scale-out" in refused.json()["error"]["message"]


def test_tokens_go_in_and_come_out(client: Client) -> None:
    body = {"request_id": "r1", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "logprobs": 1, "temperature": 0}}
    reply = ok(client.post(GENERATE, {**body, "return_token_ids": True, "priority": 2, "session_id": "s"}))
    [choice] = reply["choices"]
    assert (reply["request_id"], reply["output_mode"], reply["prompt_token_ids"]) == ("r1", "tokens", [5, 6, 7])
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert len(choice["token_ids"]) == 3 and choice["finish_reason"] == "length" and "text" not in choice
    content = choice["logprobs"]["content"]
    assert [each["token_id"] for each in content] == choice["token_ids"]
    assert content[0]["top_logprobs"][0] == {"token_id": content[0]["token_id"], "logprob": -0.5, "rank": 2}
    request = client.core.requests[-1]  # type: ignore[attr-defined]
    assert (request.options.priority, request.options.session_id, request.sampling_params.detokenize) == (2, "s", False)
    chunks = events(client.post(GENERATE, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert [id for chunk in chunks for each in chunk["choices"] for id in each["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == reply["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    text = ok(client.post(GENERATE, {**body, "output_mode": "text"}))["choices"][0]
    assert text["text"] == "one two three" and text["logprobs"]["content"][0]["token"] == "one"
    assert ok(client.post(GENERATE, {"token_ids": [5], "sampling_params": {}}))["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": [10**9]}, "token_ids", "the vocabulary has 0 to"),
        ({"token_ids": [5] * 200}, "token_ids", "maximum context length is 200"),
        ({"features": {"mm_hashes": {}}}, "features", "with images"),
        ({"sampling_params": {"watermarking": True}}, "sampling_params", "watermarking is not supported"),
        ({"sampling_params": {"temperature": -1}}, "temperature", "at least 0"),
        ({"sampling_params": {"n": 10**6}}, "n", "--max-n"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "sampling_params", "detokenize to be true"),
        ({"output_mode": "derender", "stream": True}, "output_mode", "cannot be streamed"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params", "cannot be streamed"),
        ({"sampling_params": {"stop": 5}}, "sampling_params", "sampling_params.stop"),
    ],
)
def test_what_generate_refuses_is_named(client: Client, fields: dict[str, Any], param: str, words: str) -> None:
    refused = client.post(GENERATE, {"token_ids": [5], "sampling_params": {}, **fields})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == param and words in error["message"], error


def test_requests_are_aborted_by_their_ids(engine: AsyncLLM, core: FakeEngineCore, gate: Any) -> None:
    with Client(create_app(engine, options(enable_scale_out=True))) as client:

        async def both() -> tuple[httpx.Response, httpx.Response]:
            transport, before = httpx.ASGITransport(client.app), len(core.requests)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                body = {"request_id": "mine", "token_ids": [5], "sampling_params": {"max_tokens": 190}}
                running = asyncio.create_task(http.post(GENERATE, json=body))
                while len(core.requests) == before:
                    await asyncio.sleep(0.001)
                aborting = asyncio.create_task(http.post(ABORT, json={"request_ids": ["mine", "unknown"]}))
                while not (running.done() and aborting.done()):
                    gate.release()  # a step of the engine, between which it takes commands
                    await asyncio.sleep(0.01)
                return await aborting, await running

        aborted, reply = client.run(both())
        assert (aborted.status_code, aborted.content) == (200, b"")
        assert ok(reply)["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"stop": ["two"], "temperature": 0.5, "seed": 1},
        {"n": 2, "max_tokens": 2, "temperature": 1.0},
        {"response_format": {"type": "json_object"}, "logit_bias": {"5": 1}, "bad_words": ["no"]},
    ],
)
def test_a_chat_in_three_steps_is_the_chat(client: Client, body: dict[str, Any]) -> None:
    body = {**HI, **body}
    direct = ok(client.post(CHAT, body))
    rendered = ok(client.post(f"{CHAT}/render", body))
    assert rendered["token_ids"] == client.core.requests[-1].prompt_token_ids  # type: ignore[attr-defined]
    tokens = ok(client.post(GENERATE, rendered))
    given = {"chat_request": body, "prompt_token_ids": rendered["token_ids"]}
    found = ok(client.post(f"{CHAT}/derender", {"generate_response": tokens, **given}))
    assert found["id"] == rendered["request_id"] and found["id"].startswith("chatcmpl-")
    direct["usage"].pop("prompt_tokens_details", None)
    assert without_ids(found) == without_ids(direct)


@pytest.mark.parametrize("body", [{}, {"logprobs": 1, "return_token_ids": True}, {"echo": True, "n": 2}, {"stop": "two"}])
def test_completions_in_three_steps_are_the_completions(client: Client, body: dict[str, Any]) -> None:
    body = {"prompt": ["a b", "c"], "max_tokens": 20, **body}
    direct = ok(client.post(COMPLETIONS, body))
    rendered = ok(client.post(f"{COMPLETIONS}/render", body))
    tokens = [ok(client.post(GENERATE, each)) for each in rendered]
    given = {"completion_request": body, "prompt_token_ids": [each["token_ids"] for each in rendered]}
    found = ok(client.post(f"{COMPLETIONS}/derender", {"generate_responses": tokens, **given}))
    assert without_ids(found) == without_ids(direct)


def test_reasoning_and_calls_are_read_of_tokens(caller: Client) -> None:
    body = {**HI, "tools": TOOLS}
    direct = without_ids(ok(caller.post(CHAT, body)))
    rendered = ok(caller.post(f"{CHAT}/render", body))
    assert [tool["function"]["name"] for tool in rendered["parse_context"]["tools"]] == ["weather", "time"]
    tokens = ok(caller.post(GENERATE, rendered))
    given = {"generate_response": tokens, "chat_request": body, "prompt_token_ids": rendered["token_ids"]}
    found = without_ids(ok(caller.post(f"{CHAT}/derender", given)))
    assert found["choices"] == direct["choices"]
    assert found["usage"].pop("completion_tokens_details")["reasoning_tokens"] > 0
    direct["usage"].pop("completion_tokens_details")  # an estimate where an update of the engine has several tokens
    assert found["usage"] == direct["usage"]
    assert found["choices"][0]["message"]["reasoning"] == "I must look it up."
    at_once = ok(caller.post(GENERATE, {**rendered, "output_mode": "derender"}))
    message = at_once["choices"][0]["message"]
    assert at_once["choices"][0]["finish_reason"] == "tool_calls" and message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    for wrong, param in (None, "parse_context"), ({"tool_choice": "required"}, "tool_choice"):
        refused = caller.post(GENERATE, {**rendered, "output_mode": "derender", "parse_context": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    plain = ok(caller.post(GENERATE, {**rendered, "output_mode": "derender", "parse_context": {"include_reasoning": False}}))
    assert "reasoning" not in plain["choices"][0]["message"] and "tool_calls" not in plain["choices"][0]["message"]
    refused = caller.post(f"{CHAT}/derender", {"generate_response": tokens})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_request"


def test_chunks_of_chats_are_read_one_by_one(caller: Client) -> None:
    body = {**HI, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    rendered = ok(caller.post(f"{CHAT}/render", body))
    state, deltas, reasons, last = None, [], [], None
    for chunk in token_by_token(events(caller.post(GENERATE, rendered))):
        given = {"chat_request": body, "prompt_token_ids": rendered["token_ids"], "stream_state": state}
        found = ok(caller.post(f"{CHAT}/derender", {"stream": True, "generate_chunk": chunk, **given}))
        state, last = found["stream_state"], found["chunk"]
        deltas += [choice["delta"] for choice in last["choices"]]
        reasons += [choice["finish_reason"] for choice in last["choices"]]
    direct = ok(caller.post(CHAT, {**HI, "tools": TOOLS}))
    message = direct["choices"][0]["message"]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["weather", "time"]
    assert [call["id"] for call in calls if "id" in call] == state["last_tool_call_ids"]
    arguments = ["".join(c["function"]["arguments"] for c in calls if c["index"] == index) for index in (0, 1)]
    assert arguments == [call["function"]["arguments"] for call in message["tool_calls"]]
    assert reasons[-1] == "tool_calls" and last["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    wrong = {"stream": True, "generate_chunk": {"choices": [{"index": 0, "token_ids": [5]}]}, "chat_request": body}
    state["output_chunk_lens"] = [1]
    refused = caller.post(f"{CHAT}/derender", {**wrong, "prompt_token_ids": [5], "stream_state": state})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_state"


@pytest.mark.parametrize("fields", [{}, {"stop": "two"}, {"logprobs": 1}])
def test_chunks_of_completions_are_read_one_by_one(client: Client, fields: dict[str, Any]) -> None:
    body = {"prompt": "a", "max_tokens": 20, **fields}
    [rendered] = ok(client.post(f"{COMPLETIONS}/render", {**body, "stream": True}))
    state, choices = None, []
    for chunk in token_by_token(events(client.post(GENERATE, rendered))):
        given = {"completion_request": body, "prompt_token_ids": rendered["token_ids"], "stream_state": state}
        found = ok(client.post(f"{COMPLETIONS}/derender", {"stream": True, "generate_chunk": chunk, **given}))
        state = found["stream_state"]
        choices += found["chunk"]["choices"]
    direct = ok(client.post(COMPLETIONS, body))["choices"][0]
    assert "".join(choice["text"] for choice in choices) == direct["text"]
    assert choices[-1]["finish_reason"] == direct["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == direct["stop_reason"]
    if "logprobs" in fields:
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert offsets == direct["logprobs"]["text_offset"]


@pytest.mark.parametrize(("path", "body"), [("/v1/messages", {**HI, "max_tokens": 5}), ("/v1/responses", {"input": "hi"})])
def test_other_apis_render_the_prompts_that_they_serve(client: Client, path: str, body: dict[str, Any]) -> None:
    rendered = ok(client.post(f"{path}/render", body))
    ok(client.post(path, body))
    served = client.core.requests[-1]  # type: ignore[attr-defined]
    assert rendered["token_ids"] == served.prompt_token_ids
    assert rendered["sampling_params"]["max_tokens"] == served.sampling_params.max_tokens
    assert ok(client.post(GENERATE, rendered))["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("reply", "fields", "param"),
    [
        ({"choices": [{"index": 0, "token_ids": [10**12]}]}, {}, "token_ids"),
        ({"choices": [{"index": 0, "token_ids": [-1]}]}, {}, "generate_response"),
        ({"choices": [{"index": 0, "token_ids": [5]}] * 2}, {}, "choices"),
        ({"choices": [{"index": 0, "token_ids": [5] * 201}]}, {}, "token_ids"),
        (
            {"choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [{"token_id": 10**12, "logprob": -1.0}]}}]},
            {},
            "token_ids",
        ),
        ({"choices": [], "output_mode": "text"}, {}, "generate_response"),
        ({"choices": []}, {"prompt_token_ids": [10**12]}, "prompt_token_ids"),
        ({"choices": []}, {"chat_request": {}}, "chat_request"),
        (None, {}, "generate_response"),
        ({"choices": []}, {}, "choices"),
    ],
)
def test_what_derender_cannot_read_is_named(client: Client, reply: Any, fields: dict[str, Any], param: str) -> None:
    answer = client.post(f"{CHAT}/derender", {"generate_response": reply, "chat_request": HI, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_an_aborted_answer_keeps_its_text(client: Client) -> None:
    ids = ok(client.post(GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 2}}))["choices"][0]["token_ids"]
    choice = {"index": 3, "token_ids": ids, "finish_reason": "abort"}
    for path, reply in (
        (CHAT, {"generate_response": {"choices": [choice]}, "chat_request": HI}),
        (COMPLETIONS, {"generate_responses": [{"choices": [choice]}]}),
    ):
        [found] = ok(client.post(f"{path}/derender", reply))["choices"]
        assert found["finish_reason"] == "abort" and "one two" in (found.get("text") or found["message"]["content"])


def test_a_search_is_not_rendered(client: Client) -> None:
    refused = client.post(f"{CHAT}/render", {**HI, "use_beam_search": True, "max_tokens": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "use_beam_search"
