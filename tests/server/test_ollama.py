"""ollama's API: the same answers as chat completions, in ollama's format."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.text.generation_config import LLAMA_CPP
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.canned import caller_app
from tests.server.client import Client
from tests.server.conftest import options

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")]
CALLS = [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}, {"function": {"name": "time", "arguments": {}}}]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a model that answers with reasoning, text and two calls."""
    with caller_app(tmp_path_factory.mktemp("ollama")) as app, Client(app) as client:
        yield client


def lines(reply: Any) -> list[Any]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_conversation_is_answered_line_by_line_and_whole(client: Client) -> None:
    *pieces, last = lines(client.post("/api/chat", {"model": "m:latest", "messages": [USER]}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "one two three"
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"], last["eval_count"]) == (True, "stop", "", 4)
    whole = client.post("/api/chat", {"model": "m", "messages": [USER], "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "one two three"}
    assert whole["prompt_eval_count"] == last["prompt_eval_count"] > 0 and whole["total_duration"] > 0


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_answered_or_continued(client: Client, core: FakeEngineCore, raw: bool, stream: bool) -> None:
    reply = client.post("/api/generate", {"prompt": "hi", "raw": raw, "stream": stream, "options": {"num_predict": 2}})
    found = lines(reply) if stream else [reply.json()]
    assert "".join(piece["response"] for piece in found).strip() == "one two"
    assert found[-1]["done_reason"] == "length"
    assert (len(core.requests[-1].prompt_token_ids) < 5) == raw


@pytest.mark.parametrize("raw", [False, True])
def test_any_num_predict_is_cut_to_the_context(client: Client, core: FakeEngineCore, raw: bool) -> None:
    reply = client.post("/api/generate", {"prompt": "hi", "raw": raw, "options": {"num_predict": 10**6}})
    assert reply.status_code == 200, reply.text
    request = core.requests[-1]
    assert len(request.prompt_token_ids) + request.sampling_params.max_tokens == core.max_model_len


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_have_their_places(caller: Client, stream: bool) -> None:
    reply = caller.post("/api/chat", {"messages": [USER], "tools": TOOLS, "stream": stream})
    messages = [piece["message"] for piece in (lines(reply) if stream else [reply.json()])]
    assert "".join(message.get("thinking", "") for message in messages) == "I must look it up."
    assert "".join(message["content"] for message in messages) == "Let me see."
    assert [call for message in messages for call in message.get("tool_calls", ())] == CALLS
    asked = {"messages": [USER], "tools": TOOLS, "stream": False, "think": False}
    assert "thinking" not in caller.post("/api/chat", asked).json()["message"]


def test_calls_and_their_results_may_be_sent_back(caller: Client) -> None:
    results = [{"role": "tool", "tool_name": name, "content": "20"} for name in ("weather", "time")]
    history = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, *results]
    assert caller.post("/api/chat", {"messages": history, "stream": False}).json()["done"] is True


def test_options_and_formats_reach_the_engine(client: Client, core: FakeEngineCore) -> None:
    given = {"temperature": 0.5, "top_k": 7, "seed": 3, "stop": ["x"], "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 0}
    body = {"messages": [USER], "options": given, "format": {"type": "object"}, "keep_alive": "5m"}
    assert lines(client.post("/api/chat", body))[-1]["done"]
    params = core.requests[-1].sampling_params
    assert (params.temperature, params.top_k, params.seed, params.stop, params.repetition_penalty) == (0.5, 7, 3, ["x"], 1.1)
    assert core.requests[-1].grammar is not None


@pytest.mark.parametrize(("path", "body"), [("chat", {"messages": [USER]}), ("generate", {"prompt": "hi"})])
def test_what_is_left_out_is_llama_cpps_where_the_model_has_no_generation_config(
    client: Client, core: FakeEngineCore, path: str, body: Mapping[str, Any]
) -> None:
    for more in ({}, {"raw": True}) if path == "generate" else ({},):
        lines(client.post(f"/api/{path}", {**body, **more, "options": {"top_k": 7}}))
        params = core.requests[-1].sampling_params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 7, 0.95, 0.05)
    client.chat()
    params = core.requests[-1].sampling_params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1, 0, 1, 0)
    assert client.get("/v1/models").json()["data"][0]["chat_sampling"] == LLAMA_CPP


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "nobody", "messages": [USER]}, 404, "this server has 'm'"),
        ("/api/chat", {"messages": [{**USER, "images": ["AAAA"]}]}, 400, "takes text alone"),
        ("/api/chat", {"messages": [USER], "options": {"mirostat": 2}}, 400, "'mirostat', which is not supported; it may be 0"),
        ("/api/chat", {"messages": [USER], "options": {"temprature": 1}}, 400, "known are num_predict, temperature"),
        ("/api/chat", {"messages": [USER], "options": {"temperature": -1}}, 400, "temperature is -1"),
        ("/api/generate", {"prompt": "hi", "suffix": "x"}, 400, "suffix is not supported"),
        ("/api/generate", {"prompt": "a " * 900}, 400, "maximum context length"),
        ("/api/show", {"model": "nobody"}, 404, "this server has 'm'"),
        ("/api/show", {}, 400, "model is missing"),
        ("/api/embed", {"input": "a " * 300, "truncate": False}, 400, "input"),
        ("/api/embed", {"input": "hi", "dimensions": 0}, 400, "dimensions is 0"),
        ("/api/pull", {"model": "m"}, 404, "there is nothing at /api/pull"),
    ],
)
def test_errors_have_ollamas_shape(client: Client, path: str, body: Mapping[str, Any], status: int, text: str) -> None:
    reply = client.post(path, body)
    assert reply.status_code == status and list(reply.json()) == ["error"]
    assert text in reply.json()["error"]


@pytest.mark.parametrize(
    ("gguf_type", "told"),
    [
        (None, {"format": "safetensors", "quantization_level": ""}),
        ("Q4_K_M", {"format": "gguf", "quantization_level": "Q4_K_M"}),
    ],
)
def test_the_list_says_the_format(
    client: Client, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, gguf_type: str | None, told: dict[str, str]
) -> None:
    monkeypatch.setattr(engine, "model_config", dataclasses.replace(engine.model_config, gguf_type=gguf_type))
    [model] = client.get("/api/tags").json()["models"]
    common = {"family": "llama", "families": ["llama"], "parent_model": "", "parameter_size": ""}
    assert model["details"] == {**common, **told}


def test_the_model_is_listed_and_an_empty_request_asks_only_for_it(client: Client, engine: AsyncLLM) -> None:
    assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["m"]
    assert client.get("/api/version").json()["version"]
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"model": "m"})):
        assert client.post(path, body).json()["done_reason"] == "load"
    with Client(create_app(engine, options(api_key=["secret"]))) as guarded:
        assert list(guarded.get("/api/tags").json()) == ["error"]
