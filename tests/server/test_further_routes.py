"""Routes other than OpenAI's, and fields of replies other than the answer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.server.client import Client
from tests.server.conftest import options

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def whole(engine: AsyncLLM) -> Iterator[Client]:
    more = {"root_path": "/llm", "enable_tokenizer_info_endpoint": True, "served_model_name": ["m", "other"]}
    with Client(create_app(engine, options(**more))) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "object"),
    [
        ({"messages": [USER]}, "chat.completion"),
        ({"prompt": "hi"}, "text_completion"),
        ({"input": "hi"}, "list"),
        ({"text_1": "a", "text_2": ["b"]}, "list"),
        ({"queries": "a", "documents": ["b"]}, "list"),
        ({"query": "a", "documents": ["b"]}, None),
        ({"model": "m"}, "error"),
    ],
)
def test_the_body_of_an_invocation_says_what_is_meant(client: Client, body: Mapping[str, Any], object: str | None) -> None:
    reply = client.post("/invocations", body)
    assert reply.status_code == (400 if object == "error" else 200), reply.text
    assert reply.json().get("object", "error" if "error" in reply.json() else None) == object


def test_several_conversations_are_answered_in_their_places(client: Client) -> None:
    long = {"role": "user", "content": "a much longer text"}
    asked = {"messages": [[USER], [long]], "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
    reply = client.post("/v1/chat/completions/batch", asked).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["one two"] * 2
    lengths = [len(choice["prompt_token_ids"]) for choice in reply["choices"]]
    assert lengths == [len(choice["prompt_logprobs"]) for choice in reply["choices"]] and lengths[0] < lengths[1]
    assert reply["usage"] == {"prompt_tokens": sum(lengths), "completion_tokens": 4, "total_tokens": sum(lengths) + 4}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [[USER]] * 1025}, "messages"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [[USER], [{"role": ""}]]}, "messages"),
    ],
)
def test_what_several_conversations_cannot_have_is_refused(client: Client, fields: Mapping[str, Any], param: str) -> None:
    reply = client.post("/v1/chat/completions/batch", {"messages": [[USER]], **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_the_tokens_of_an_input_are_counted_as_they_are_used(client: Client) -> None:
    asked = {"input": "hi there", "instructions": "be kind"}
    counted = client.post("/v1/responses/input_tokens", asked).json()
    used = client.post("/v1/responses", asked).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}
    assert client.post("/v1/responses/input_tokens", {"input": []}).json()["error"]["param"] == "input"


def test_the_engines_load_comes_in_a_header_if_it_is_asked_for(client: Client) -> None:
    def told(format: str, path: str = "/v1/completions") -> str | None:
        headers = {"endpoint-load-metrics-format": format}
        return client.post(path, {"prompt": "hi"}, headers=headers).headers.get("endpoint-load-metrics")

    assert told("text") == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=0"
    kind, _, text = (told("JSON") or "").partition(" ")
    assert kind == "JSON" and json.loads(text)["named_metrics"] == {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 0}
    assert told("xml") is None and told("TEXT", "/tokenize") is None
    assert "endpoint-load-metrics" not in client.complete().headers


def test_the_tokenizer_is_described_only_if_that_is_wanted(client: Client, whole: Client) -> None:
    assert client.get("/tokenizer_info").status_code == 404
    info = whole.get("/tokenizer_info").json()
    assert "message" in info["chat_template"] and info["tokenizer_class"] and "eos_token" in info


def test_models_have_names_and_permissions(whole: Client) -> None:
    models = whole.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["m", "other"]
    for model in models:
        (permission,) = model["permission"]
        assert permission["object"] == "model_permission" and permission["allow_sampling"] is True
    assert whole.chat(model="other").json()["model"] == "m"


def test_the_document_of_the_api_knows_the_path_of_the_proxy(client: Client, whole: Client) -> None:
    assert whole.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert "servers" not in client.get("/openapi.json").json()


def test_a_local_model_has_a_short_name_and_its_path_is_taken_too(engine: AsyncLLM, served_directory: Path) -> None:
    with Client(create_app(engine, options(served_model_name=None))) as client:
        name, path = served_directory.name, str(served_directory)
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [name]
        assert client.get(f"/v1/models/{name}").json()["id"] == client.get(f"/v1/models/{path}").json()["id"] == name
        assert [client.complete(model=model).json().get("model") for model in (name, path, None, "other")] == [name] * 3 + [
            None
        ]
        assert f'model_name="{name}"' in client.get("/metrics").text
    with Client(create_app(engine, options())) as client:  # which has its own name
        assert client.complete(model=path).status_code == 404
