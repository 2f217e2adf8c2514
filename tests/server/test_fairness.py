"""Clients are distinguished: how many requests each may have at once, who is served in turn, and who does not read."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import SERVED_QUEUED_REQS, EngineConfig
from server.app import create_app
from server.clients import Clients
from server.connection import uvicorn_config
from server.listening import address_of, listen
from server.served_config import served_config
from server.unread import UNSENT_BYTES, SendWatch
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.client import Client
from tests.server.conftest import options

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/api/chat": {**CHAT, "model": "m"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/tokenize": {"prompt": "hi"},
}


class Wire(Client):
    """A client whose requests come from any address."""

    async def answer(self, path: str, key: str | None = None, host: str = "10.0.0.1", **body: Any) -> tuple[int, Any, Any]:
        """Status, headers and body of the answer to a POST."""
        raw = json.dumps(body or BODIES[path]).encode()
        headers = [(b"host", b"test"), (b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        headers += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "root_path": ""}
        messages: list[Any] = [{"type": "http.request", "body": raw, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app({**scope, "query_string": b"", "headers": headers, "client": (host, 5)}, receive, send)
        found = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(found)


@pytest.fixture
def wire(engine: AsyncLLM) -> Iterator[Wire]:
    chosen = options(api_key=["a", "b"], admin_api_key="root", max_concurrent_requests_per_key=2, enable_scale_out=True)
    with Wire(create_app(engine, chosen)) as wire:
        yield wire


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_key_has_its_number_of_requests_over_all_routes(wire: Wire, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    counts = wire.app.state.context.clients._num_running

    async def run() -> None:
        long = {"prompt": "hi", "max_tokens": 3}
        running = [asyncio.ensure_future(wire.answer("/v1/completions", "a", **long)) for _ in range(2)]
        await until(lambda: sum(counts.values()) == 2)
        for path in BODIES:
            status, headers, body = await wire.answer(path, "a")
            assert (status, headers[b"retry-after"]) == (429, b"1"), path
            assert "--max-concurrent-requests-per-key" in json.dumps(body)
        assert body["error"]["code"] == "rate_limit_exceeded" and body["error"]["type"] == "rate_limit_error"
        assert (await wire.answer("/v1/responses/resp_x/cancel", "a", x=1))[0] == 404, "what ends requests is not counted"
        running.append(asyncio.ensure_future(wire.answer("/v1/completions", "b", **long)))
        await until(lambda: len(counts) == 2)
        gate.release(100)
        assert [answer[0] for answer in await asyncio.gather(*running)] == [200] * 3
        labels = sorted(request.options.client for request in core.requests[-3:])
        assert len(set(labels)) == 2 and not {"", "a", "b"} & set(labels)
        assert not counts and (await wire.answer("/v1/completions", "a", **long))[0] == 200
        while gate.acquire(blocking=False):
            pass
        background = {"input": "hi", "background": True, "max_output_tokens": 16}
        assert [(await wire.answer("/v1/responses", "a", **background))[0] for _ in range(3)] == [200, 200, 429]
        gate.release(100)
        await until(lambda: not counts)

    wire.run(run())
    assert f"jaxllm:rate_limited_requests_total {float(len(BODIES) + 1)}" in wire.get("/metrics").text


@pytest.mark.parametrize(
    ("host", "label"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, ""),
    ],
)
def test_without_keys_clients_are_addresses(host: str | None, label: str) -> None:
    assert Clients(options()).label_of(b"any", host) == label


def test_a_label_does_not_show_its_key() -> None:
    clients = Clients(options(api_key=["secret"]))
    assert clients.label_of(b"secret", "10.0.0.1") == clients.label_of(b"secret", "10.0.0.2") != clients.label_of(b"x", None)
    assert "secret" not in clients.label_of(b"secret", None)


def test_without_the_option_nothing_is_refused_or_counted() -> None:
    clients = Clients(options())
    for _ in range(1000):
        clients.enter({"type": "http", "method": "POST", "path": "/v1/completions", "client": ("10.0.0.1", 1)}, None)
    assert not clients._num_running


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "fair"),
        ({"api_key": ["a"]}, "fcfs"),
        ({"api_key": ["a", "b"]}, "fair"),
        ({"api_key": ["a", "a"]}, "fcfs"),
        ({"uds": "/tmp/x"}, "fcfs"),
    ],
)
def test_a_server_serves_in_turn_whom_it_can_tell_apart(given: dict[str, Any], policy: str) -> None:
    found = served_config(EngineConfig(), options(**given)).scheduler
    assert found.scheduling_policy == policy and found.max_num_queued_reqs == SERVED_QUEUED_REQS
    asked = EngineConfig.from_options(
        scheduling_policy="priority", max_num_queued_reqs=-1, max_num_queued_tokens=7, max_queued_image_gb=1
    )
    assert served_config(asked, options(**given)) == asked


class Endless:
    """An application that writes until its client leaves."""

    def __init__(self) -> None:
        self.num_bytes: dict[int, int] = {}
        """By the client's port."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        port = scope["client"][1]

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.ensure_future(left())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            self.num_bytes[port] = self.num_bytes.get(port, 0) + 1000
            await asyncio.sleep(0)
        self.num_bytes.pop(port)


def test_a_client_that_reads_nothing_is_cut_off_and_one_that_reads_little_is_not() -> None:
    app = Endless()
    chosen = options(unread_stream_timeout=0.2, port=0)
    num_ended = SendWatch.num_ended

    async def run() -> None:
        server = uvicorn.Server(uvicorn_config(app, chosen, lifespan="off"))
        [listening] = listen(chosen.network)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        await until(lambda: server.started)
        silent, slow = socket.create_connection(address_of(listening)), socket.create_connection(address_of(listening))
        for each in (silent, slow):
            each.setblocking(False)
            each.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(app.num_bytes) == 2)
        loop = asyncio.get_running_loop()
        cut_off, end = loop.time() + 10, loop.time() + 0.5
        ports = [each.getsockname()[1] for each in (silent, slow)]
        most = 0
        while loop.time() < cut_off and (ports[0] in app.num_bytes or loop.time() < end):
            slow.recv(100_000)
            most = max(most, app.num_bytes.get(ports[0], 0))
            await asyncio.sleep(0.05)
        assert list(app.num_bytes) == ports[1:], "the wrong client was cut off, or none"
        assert most < 2_000_000 and SendWatch.num_ended == num_ended + 1
        for each in (silent, slow):
            each.close()
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_kernel_takes_little_of_an_answer_beyond_what_fits_the_client() -> None:
    [listening] = listen(options(port=0).network)
    with listening, socket.create_connection(address_of(listening)) as _, listening.accept()[0] as accepted:
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
