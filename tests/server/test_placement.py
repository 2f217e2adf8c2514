"""Where and when a request runs, as fields and headers say: sessions, priorities."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.server.client import Client
from tests.server.conftest import options

HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": HI,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**HI, "max_tokens": 5},
}


@pytest.fixture(scope="module")
def core(served_directory: Path) -> FakeEngineCore:
    return fake_core(served_directory, max_model_len=200, scheduling_policy="priority")


@pytest.fixture(scope="module")
def client(core: FakeEngineCore) -> Iterator[Client]:
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_sessions_and_priorities_reach_the_engine(client: Client, core: FakeEngineCore, path: str) -> None:
    def placed(headers: dict[str, str], **fields: Any) -> tuple[str | None, int]:
        reply = client.post(path, {**BODIES[path], **fields}, headers=headers)
        assert reply.status_code == 200, reply.text
        request = core.requests[-1]
        return request.options.session_id, request.options.priority

    assert placed({}) == (None, 0)
    assert placed({}, session_id="a", priority=3) == ("a", 3)
    assert placed({"X-Session-ID": "b", "X-Vllm-Priority": "-7"}) == ("b", -7)
    assert placed({"X-Session-ID": "b", "X-Vllm-Priority": "9"}, session_id="a", priority=3) == ("a", 9)
    assert placed({"X-Session-ID": ""}, session_id="") == (None, 0)


def test_wrong_headers_are_named(client: Client) -> None:
    for header, value in (("x-vllm-priority", "high"), ("x-vllm-priority", "1.5"), ("x-session-id", "a" * 513)):
        refused = client.post("/v1/completions", BODIES["/v1/completions"], headers={header: value})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == header and header in error["message"]
