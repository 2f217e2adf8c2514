"""The option --error-format: OpenAI's shape, or vLLM's."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineError
from server.app import create_app
from server.chat_deltas import ChatDelta
from server.gate import Gate
from tests.server.canned import answer_with
from tests.server.client import Client, events
from tests.server.conftest import options

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
KEY = {"authorization": "Bearer k"}


@pytest.fixture(scope="module")
def vllm(engine: AsyncLLM) -> Iterator[Client]:
    """A client of a server that writes errors as vLLM does."""
    with Client(create_app(engine, options(error_format="vllm", api_key=["k"])), headers=KEY) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "param"),
    [
        ("POST", CHAT, {"messages": [USER], "top_p": 7}, 400, "BadRequestError", "top_p"),
        ("POST", CHAT, {"messages": [USER], "n": "x", "stream": True}, 400, "BadRequestError", "n"),
        ("POST", CHAT, {"messages": [USER], "model": "other"}, 404, "NotFoundError", "model"),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": "r"}, 404, "NotFoundError", "previous_response_id"),
        ("GET", "/nothing", None, 404, "Not Found", None),
        ("GET", CHAT, None, 405, "Method Not Allowed", None),
    ],
)
def test_errors_have_vllms_shape_where_it_is_asked_for(
    vllm: Client, method: str, path: str, body: Any, status: int, kind: str, param: str | None
) -> None:
    reply = vllm.request(method, path, **({} if body is None else {"json": body}))
    error = reply.json()["error"]
    assert (reply.status_code, error.pop("message") != "") == (status, True)
    assert error == {"type": kind, "param": param, "code": status}


def test_a_wrong_key_is_answered_as_vllm_does(vllm: Client) -> None:
    reply = vllm.post(CHAT, {"messages": [USER]}, headers={"authorization": "Bearer x"})
    assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})


def test_a_stream_that_fails_ends_with_vllms_error(vllm: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, vllm.app, [ChatDelta(0, content="so far"), EngineError("secret")])
    error = events(vllm.chat(stream=True))[-1]["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)


def test_other_apis_keep_their_shapes(vllm: Client) -> None:
    assert vllm.post("/v1/messages", {"messages": [USER]}).json()["type"] == "error"
    assert isinstance(vllm.post("/api/chat", {"messages": [USER], "options": {"zzz": 1}}).json()["error"], str)


@pytest.mark.parametrize(("error_format", "code"), [("openai", "loading"), ("vllm", 503)])
def test_a_server_that_loads_answers_in_the_same_format(error_format: Any, code: Any) -> None:
    with Client(Gate(lambda: None, error_format=error_format)) as client:
        reply = client.post(CHAT, {"messages": [USER]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, code)
