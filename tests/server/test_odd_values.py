"""Every field of every body with values of every kind: a bad value is a client error, never a server error."""

from typing import Any

import pytest
from pydantic import BaseModel

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.server.client import Client

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
VALUES: list[Any] = [
    None, True, -1, 2**63, -(2**80), 0.5, 1e308, "", "x\x00", "ü" * 300, [], [[]], [None], [2**40], ["a"], [{}], {}, {"": ""}, {"a": 1},
    {"type": "json_schema"}, {"json": {}}, [{"role": "assistant", "content": None, "tool_calls": [{}]}],
]  # fmt: skip
FIELDS = [(path, name) for path, (model, _) in BODIES.items() for name in model.model_fields]


@pytest.mark.parametrize(("path", "name"), FIELDS, ids=lambda value: value)
def test_no_value_of_a_field_is_a_fault_of_the_server(client: Client, path: str, name: str) -> None:
    statuses = {}
    for value in VALUES:
        reply = client.post(path, {**BODIES[path][1], name: value})
        statuses[repr(value)] = reply.status_code
        if reply.status_code >= 400:
            error = reply.json()["error"]
            assert len(reply.content) < 5000 and error["message"] and error["type"]
    expected = (
        (200, 400, 404, 408) if name == "timeout" else (200, 400, 404)
    )  # a machine with much to do takes longer than 0.5 s
    wrong = {value: status for value, status in statuses.items() if status not in expected}
    assert not wrong
