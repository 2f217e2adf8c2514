"""Bodies of the Responses and the Messages API with arbitrary values in any place never cause a server error."""

import copy
import json
import random
from typing import Any

import pytest

from tests.server.canned import WEATHER
from tests.server.client import Client

RESPONSES = {
    "input": [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "20"}]},
    ],
    "instructions": "be brief",
    "max_output_tokens": 3,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tools": [{"type": "function", "name": "f", "parameters": WEATHER}],
    "tool_choice": "none",
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "truncation": "auto",
    "logit_bias": {"5": 1.0},
}
MESSAGES = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "be kind"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "so"}],
        },
        {"role": "user", "content": [{"type": "text", "text": "on"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "20"}]}]},
    ],
    "tools": [{"name": "f", "input_schema": WEATHER}],
    "tool_choice": {"type": "none"},
    "stop_sequences": ["x"],
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
}
JUNK: list[Any] = [None, True, 0, -1, 10**30, 1.5, 1e308, "", "x", "\0", "\ufffe", "a" * 3000, [], [[]], [None]]
JUNK += [{}, {"type": "zzz"}, {"type": None}, {"a": {"b": []}}]


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside one."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, child in children for place in places(child, (*way, key)))]


def changed(body: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """The body with one value replaced, or left out."""
    found = copy.deepcopy(body)
    *way, last = dice.choice(places(body)[1:])
    inside = found
    for key in way:
        inside = inside[key]
    if dice.random() < 0.2:
        del inside[last]
    else:
        inside[last] = dice.choice(JUNK)
    return found


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES)]
)
def test_no_body_is_a_fault_of_the_server(client: Client, path: str, body: dict[str, Any]) -> None:
    dice = random.Random(path)
    num_good = 0
    for number in range(150):
        sent = {**changed(body, dice), "stream": number % 2 == 1}
        reply = client.post(path, sent)
        assert reply.status_code in (200, 400, 404), (reply.text, json.dumps(sent)[:2000])
        num_good += reply.status_code == 200
    assert num_good > 10
    assert client.post(path, body).status_code == 200
