"""The routes of Anthropic's Messages API."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.errors import EngineError
from server.chat_deltas import ChatDelta
from tests.server.canned import WEATHER, answer_with, caller_app
from tests.server.client import Client
from tests.server.test_responses import named_events


def ask(client: Client, **body: Any) -> httpx.Response:
    return client.post("/v1/messages", {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], **body})


def test_a_message_is_answered(client: Client) -> None:
    message = ask(client).json()
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
    assert message["content"] == [{"type": "text", "text": "one two three"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["output_tokens"] == 4


def test_a_stream_says_the_same_in_events(client: Client) -> None:
    events = named_events(ask(client, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == "one two three"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"max_tokens": 2}, "max_tokens"), ({"stop_sequences": ["two"]}, "stop_sequence")],
)
def test_it_says_why_it_ended(client: Client, body: dict[str, Any], reason: str) -> None:
    message = ask(client, **body).json()
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == (body.get("stop_sequences") or [None])[0]


def test_thoughts_and_calls_are_blocks(tmp_path: Path) -> None:
    tools = [{"name": name, "input_schema": WEATHER} for name in ("weather", "time")]
    with caller_app(tmp_path / "model") as app, Client(app) as caller:
        message = ask(caller, tools=tools, max_tokens=500).json()
        thought, text, weather, time = message["content"]
        assert (thought["thinking"], text["text"]) == ("I must look it up.", "Let me see.")
        assert (weather["name"], weather["input"], time["input"]) == ("weather", {"city": "Köln"}, {})
        assert message["stop_reason"] == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "20"} for call in (weather, time)]
        turns = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": results},
        ]
        assert ask(caller, tools=tools, messages=turns).status_code == 200
        counts = [
            caller.post("/v1/messages/count_tokens", {"messages": turns, "tools": tools, "thinking": {"type": "disabled"}}),
            caller.post("/v1/messages/count_tokens", {"messages": turns, "tools": tools}),
        ]
        assert counts[0].json()["input_tokens"] > counts[1].json()["input_tokens"]  # the template prints "False"


def test_a_model_without_thinking_ignores_its_budget(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.app.state.context.engine, "max_model_len", 2000)
    reply = ask(client, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    assert (reply.status_code, reply.json()["stop_reason"]) == (200, "end_turn")


def test_tokens_are_counted_as_the_answer_counts_them(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "how many"}], "system": "count"}
    counted = client.post("/v1/messages/count_tokens", body).json()
    assert counted == {"input_tokens": ask(client, **body).json()["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "invalid_request_error"),
        ({"temperature": 1.5}, 400, "invalid_request_error"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(client: Client, body: dict[str, Any], status: int, kind: str, stream: bool) -> None:
    refused = ask(client, stream=stream, **body)
    assert refused.status_code == status
    found = refused.json()
    assert (found["type"], found["error"]["type"]) == ("error", kind)
    assert found["error"]["message"]


def test_a_body_that_is_no_json_is_refused_in_the_same_shape(client: Client) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = client.request("POST", path, content=b"{", headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_an_engine_that_fails_at_once_is_a_status_and_later_an_event(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, client.app, [EngineError("secret")])
    for stream in (False, True):
        refused = ask(client, stream=stream)
        assert (refused.status_code, refused.json()["error"]["type"]) == (500, "api_error")
    answer_with(monkeypatch, client.app, [ChatDelta(0, content="so far"), EngineError("secret")])
    events = named_events(ask(client, stream=True))
    assert events[-1]["type"] == "error"
    assert "secret" not in json.dumps(events)
