"""Requests made from the OpenAPI document, good ones and bad ones: none is a fault of the server, and every refusal has its envelope."""

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

schemathesis = pytest.importorskip("schemathesis")

import collections, os
SEEN = collections.Counter()
NUM_BODIES, NUM_OTHERS = int(os.environ.get("NB", 25)), int(os.environ.get("NO", 3))
"""Requests of each route and mode, of routes that take something, and of others."""
ELSEWHERE = {"/sleep", "/wake_up", "/start_profile", "/stop_profile"}
"""What would keep the engine from answering the rest, or write files."""


@pytest.fixture(scope="module")
def open_client(engine: AsyncLLM) -> Iterator[Client]:
    """Speaks with an application that has every route."""
    with Client(create_app(engine, options(enable_dev_endpoints=True))) as client:
        yield client


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: str(mode.value))
def test_no_request_is_a_fault_of_the_server(open_client: Client, mode: Any) -> None:
    num_refused = num_answered = 0
    for operation in operations(open_client):
        if mode == schemathesis.GenerationMode.NEGATIVE and not (operation.body or list(operation.query)):
            continue  # nothing can be wrong

        @given(operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_BODIES if operation.body else NUM_OTHERS,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def send(case: Any) -> None:
            nonlocal num_refused, num_answered
            reply = sent(open_client, case)
            assert reply.status_code < 500, reply.text
            if reply.status_code >= 400:
                num_refused += 1
                SEEN[case.path, reply.json()["error"]["message"][:150]] += 1
                check_envelope(reply, case.path)
            else:
                num_answered += 1
                assert "internal_error" not in reply.text and "engine_error" not in reply.text

        send()
    print(mode, num_answered, num_refused)
    print(*SEEN.most_common(60), sep="\n")
    assert num_answered > 20 and num_refused > 20
    assert open_client.complete().status_code == 200


def operations(client: Client) -> Iterator[Any]:
    """What the document offers."""
    document = client.get("/openapi.json").json()
    seen = set()
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        route = operation.method, re.sub(r"^/v\d", "", operation.path)  # some routes have several paths
        if operation.path not in ELSEWHERE and route not in seen:
            seen.add(route)
            yield operation


def sent(client: Client, case: Any) -> httpx.Response:
    """The answer to a case."""
    how = case.as_transport_kwargs(base_url="http://test")
    content = how.get("data")
    if isinstance(how.get("json"), dict) and isinstance(how["json"].get("model"), str):
        how["json"]["model"] = "m"
    if "json" in how:
        content = json.dumps(how["json"]).encode()
    print(how.keys(), how["headers"], case.media_type) if not isinstance(content, bytes|None) else None
    headers = {name: value for name, value in how["headers"].items() if name.lower() != "user-agent"}
    return client.request(how["method"], how["url"], headers=headers, params=how.get("params"), content=content)


def check_envelope(reply: httpx.Response, path: str) -> None:
    """Whether an error has the shape that clients of this route know."""
    body = reply.json()
    error = body["error"]
    assert reply.headers["x-request-id"] and error["message"] and isinstance(error["type"], str), body
    if path.startswith("/v1/messages"):
        assert body["type"] == "error", body
    else:
        assert set(error) >= {"param", "code"}, body
