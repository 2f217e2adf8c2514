"""Requests generated from the OpenAPI document, valid and invalid: no server errors, and every refusal has its envelope."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.server.client import Client
from tests.server.conftest import options

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis")

NUM_BODIES, NUM_OTHERS = 3, 1
"""Requests to each route in each mode: with bodies, and without."""
ELSEWHERE = {"/sleep", "/wake_up", "/pause", "/start_profile", "/stop_profile"}
"""Routes that would stop the engine or write files."""


@pytest.fixture(scope="module")
def whole_client(engine: AsyncLLM) -> Iterator[Client]:
    """A client of an application that has every route."""
    with Client(create_app(engine, options(enable_dev_endpoints=True))) as client:
        yield client


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: str(mode.value))
def test_no_request_is_a_fault_of_the_server(whole_client: Client, mode: Any) -> None:
    statuses = []
    for operation in operations(whole_client):
        if mode == schemathesis.GenerationMode.NEGATIVE and not (operation.body or list(operation.query)):
            continue  # nothing can be wrong

        @given(operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_BODIES if operation.body else NUM_OTHERS,
            suppress_health_check=list(HealthCheck),
        )
        def send(case: Any) -> None:
            reply = sent(whole_client, case)
            statuses.append(reply.status_code)
            assert reply.status_code < 500, reply.text
            if reply.status_code >= 400:
                check_envelope(reply, case.path)
            assert "internal_error" not in reply.text and "engine_error" not in reply.text, reply.text

        send()
    assert statuses.count(400) > 20 and statuses.count(200) >= 5 * (mode == schemathesis.GenerationMode.POSITIVE)
    assert whole_client.complete().status_code == 200


def operations(client: Client) -> Iterator[Any]:
    """The document's operations, one path of each route."""
    seen = set()
    for found in schemathesis.openapi.from_dict(client.get("/openapi.json").json()).get_all_operations():
        operation = found.ok()
        route = operation.method, re.sub(r"^/v\d", "", operation.path)
        if operation.path not in ELSEWHERE and route not in seen:
            seen.add(route)
            yield operation


def sent(client: Client, case: Any) -> httpx.Response:
    """The answer to a case; a model is always the one that is served."""
    asked = case.as_transport_kwargs(base_url="http://localhost")
    body, content = asked.get("json"), asked.get("data")
    if "json" in asked:
        if isinstance(body, dict) and isinstance(body.get("model"), str):
            body = {**body, "model": "m"}
        content = json.dumps(body).encode()
    assert content is None or isinstance(content, bytes)
    return client.request(
        asked["method"], asked["url"], headers=dict(asked["headers"]), params=asked.get("params"), content=content
    )


def check_envelope(reply: httpx.Response, path: str) -> None:
    """Whether an error has the format of this route's API."""
    body = reply.json()
    error = body["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str) and error, body
        return
    assert reply.headers["x-request-id"] and error["message"] and isinstance(error["type"], str), body
    if path.startswith("/v1/messages"):
        assert body["type"] == "error", body
    else:
        assert set(error) == {"message", "type", "param", "code"}, body
