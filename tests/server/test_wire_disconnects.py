"""Clients of the Responses and the Messages API that disconnect: their requests are aborted in the engine."""

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.client import Client

BODIES = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_client_that_leaves_ends_its_request(
    client: Client, core: FakeEngineCore, gate: threading.Semaphore, path: str, stream: bool, num_steps: int
) -> None:
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": headers,
    }

    async def run() -> None:
        leaves = asyncio.Event()
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return None

        for _ in range(num_steps):
            gate.release()
        waits_in = core.num_steps + num_steps + 1
        answering = asyncio.ensure_future(client.app(scope, receive, send))
        while core.num_steps < waits_in:
            await asyncio.sleep(0)
        leaves.set()
        await answering
        gate.release()
        while core.running:
            await asyncio.sleep(0)
        assert client.app.state.context.num_running == 0
        assert len(core.aborted) == 1

    core.aborted.clear()
    client.run(run())
