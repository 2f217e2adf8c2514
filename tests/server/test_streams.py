import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineError, OverloadedError
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.live_server import LiveServer
from tests.helpers.scripted_core import fake_core
from tests.server.client import Client, events
from tests.server.conftest import options

ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def core(served_directory: Path) -> FakeEngineCore:
    core = fake_core(served_directory, max_model_len=20_000)
    core.before_step = lambda: time.sleep(0.0005)
    return core


@pytest.fixture
def engine(core: FakeEngineCore) -> Iterator[AsyncLLM]:
    with AsyncLLM(core=core) as engine:
        yield engine


@pytest.fixture
def live(engine: AsyncLLM) -> Iterator[LiveServer]:
    with LiveServer.start(engine, served_model_name=["m"]) as live:
        yield live


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


def send(live: LiveServer, path: str, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection((live.host, live.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(live: LiveServer, core: FakeEngineCore, path: str, stream: bool) -> None:
    body = {**(CHAT if "chat" in path else {"prompt": ["a", "b"]}), **ENDLESS, "stream": stream}
    connection = send(live, path, body)
    until(lambda: len(core.running) == (1 if "chat" in path else 2))
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    until(lambda: not core.running)
    assert live.client.get("/load").json() == {"server_load": 0}
    assert live.client.post(path, json={**body, "stream": False, "max_tokens": 3}).status_code == 200


def test_a_client_that_does_not_read_stops_nothing_and_can_leave(live: LiveServer, core: FakeEngineCore) -> None:
    connection = send(live, "/v1/completions", {"prompt": "a", **ENDLESS, "stream": True})
    until(lambda: core.num_steps > 200)
    connection.close()
    until(lambda: not core.running)


def fail_after(core: FakeEngineCore, steps: int, error: Exception) -> None:
    first = core.num_steps

    def fail() -> None:
        time.sleep(0.005)
        if core.running and core.num_steps > first + steps:
            core.running.clear()
            raise error

    core.before_step = fail


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_engine_that_fails_is_a_status_at_first_and_an_event_later(
    engine: AsyncLLM, core: FakeEngineCore, path: str
) -> None:
    body = {**(CHAT if "chat" in path else {"prompt": "a"}), **ENDLESS, "stream": True}
    with Client(create_app(engine, options())) as client:
        fail_after(core, 0, EngineError("a step failed at /some/path"))
        early = client.post(path, body)
        assert early.status_code == 500 and early.json()["error"]["type"] == "server_error"
        fail_after(core, 50, EngineError("a step failed at /some/path"))
        late = client.post(path, body)
        *chunks, last = events(late)
        assert len(chunks) > 1 and last["error"]["type"] == "server_error"
        assert "/some/path" not in early.text + late.text


def test_a_full_queue_is_a_status_before_the_stream(engine: AsyncLLM, core: FakeEngineCore) -> None:
    def refuse(request: object) -> None:
        raise OverloadedError("100 requests wait already", 7)

    core.add_request = refuse  # type: ignore[method-assign, assignment]
    with Client(create_app(engine, options())) as client:
        for stream in (True, False):
            reply = client.complete(stream=stream)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "overloaded"
            assert reply.headers["retry-after"] == "7" and reply.headers["x-should-retry"] == "true"


def test_a_time_limit_ends_a_request(engine: AsyncLLM, core: FakeEngineCore) -> None:
    with Client(create_app(engine, options(request_timeout=0.1))) as client:
        whole = client.complete(**ENDLESS)
        assert whole.status_code == 408 and whole.json()["error"]["code"] == "timeout"
    with Client(create_app(engine, options())) as client:
        for limit in (0.1, 1, 5, 20):
            reply = client.complete(**ENDLESS, stream=True, timeout=limit)
            if reply.status_code != 408:  # else a machine with much to do did not begin in time
                break
        assert events(reply)[-1]["error"]["code"] == "timeout"
        until(lambda: not core.running)


def test_silence_is_filled_with_comments(engine: AsyncLLM, core: FakeEngineCore) -> None:
    core.before_step = lambda: time.sleep(0.05)
    with Client(create_app(engine, options(sse_keep_alive_interval=0.015))) as client:
        reply = client.complete(stream=True)
        assert reply.text.count(": keep-alive\n\n") >= 2
        assert reply.text.endswith("data: [DONE]\n\n")


def test_a_server_that_is_going_to_stop_refuses_requests_but_answers_probes(engine: AsyncLLM) -> None:
    app = create_app(engine, options())
    from server.errors import ApiError

    app.state.context.refusal = ApiError(503, "the server is going to stop")
    with Client(app) as client:
        assert client.complete().status_code == 503 and client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200 and client.get("/live").status_code == 200


def test_a_dead_engine_shows_in_health(engine: AsyncLLM) -> None:
    with Client(create_app(engine, options())) as client:
        engine.shutdown()
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503
        assert client.get("/live").status_code == 200
        assert client.complete().status_code == 503
        assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(("others", "ready"), [([], 503), (["down", "joining"], 503), (["serving"], 200)])
def test_a_stalled_engine_is_not_ready_and_health_says_so(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, others: list[str], ready: int
) -> None:
    [own] = engine.replicas()
    stalled = replace(own, state="stalled", tick_seconds=12.0, detail="no sign of life from the engine process for 12 s")
    found = [stalled, *(replace(own, rank=rank, state=state) for rank, state in enumerate(others, 1))]
    monkeypatch.setattr(engine, "replicas", lambda: found)
    with Client(create_app(engine, options())) as client:
        reply = client.get("/ready")
        assert reply.status_code == ready
        if ready == 503:
            assert reply.json()["error"]["code"] == "engine_stalled" and "no sign of life" in reply.json()["error"]["message"]
            assert reply.headers["retry-after"]
        reply = client.get("/health")
        assert reply.status_code == 200 and reply.json()["status"] == ("serving" if ready == 200 else "stalled")
        first = {"rank": 0, "state": "stalled", "running": 0, "waiting": 0, "last_tick_seconds": 12.0, "detail": stalled.detail}
        assert reply.json()["replicas"][0] == first
        metrics = client.get("/metrics").text
        assert re.search(r'replica_state{engine="0",model_name="[^"]*",state="stalled"} 1.0\n', metrics)
        assert re.search(r'engine_last_tick_seconds{engine="0",model_name="[^"]*"} 12.0\n', metrics)


def test_many_streams_at_once_say_the_same(engine: AsyncLLM) -> None:
    with Client(create_app(engine, options())) as client:
        import httpx

        async def main() -> list[str]:
            transport = httpx.ASGITransport(client.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                replies = await asyncio.gather(
                    *(http.post("/v1/chat/completions", json={**CHAT, "stream": True}) for _ in range(20))
                )
            return [reply.text for reply in replies]

        texts = client.run(main())
    for text in texts:
        chunks = [json.loads(block[6:]) for block in text.split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one two three"
