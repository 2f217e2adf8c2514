"""Whole servers as processes: their life and their faults. The core is a fake one; each server ends in its test."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.serve_processes import is_alive, serving
from tests.helpers.served_core import SLOW_FACTORY
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = {"model": "model", "prompt": "hi", "max_tokens": 50}
ENDLESS = {"model": "model", "prompt": "hi", "max_tokens": 15_000, "ignore_eos": True, "stream": True}
PROMPTLY = 25.0
"""Seconds, less than running requests get by default. A machine that has nothing else to do takes a tenth of it."""
OPTIONS = {"served_model_name": ["model"], "web": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def streaming(client: httpx.Client, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of an endless stream that has begun."""
    with client.stream("POST", "/v1/completions", json={**ENDLESS, **more}) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def last_event(lines: Iterator[str]) -> dict[str, Any]:
    """The last JSON event of a stream that ends."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return dict(json.loads(events[-1]))


def text_of(client: httpx.Client) -> str:
    reply = client.post("/v1/completions", json=PROMPT)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def num_running(client: httpx.Client) -> int:
    line = next(line for line in client.get("/metrics").text.splitlines() if line.startswith("jaxllm:num_requests_running{"))
    return int(float(line.split()[-1]))


def takes_connections(path: str) -> bool:
    """Whether something listens: a socket has its path a moment before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def test_a_server_from_its_first_second_to_a_drained_end(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    with (
        serving(model, tmp_path, core_factory=SLOW_FACTORY, root_path="/below", **OPTIONS) as server,
        server.client() as client,
    ):
        wait_until(lambda: takes_connections(str(server.uds)), "the socket does not listen")
        assert client.get("/live").status_code == 200
        wait_until(lambda: "25 %" in client.get("/ready").text, "the phase is not told")
        for path in ("/ready", "/health", "/v1/models", "/nowhere"):
            reply = client.get(path)
            assert reply.status_code == 503 and reply.headers["retry-after"]
            error = reply.json()["error"]
            assert error["code"] == "loading" and error["message"].endswith("loading weights, 25 %")
        foreign = client.get("/v1/models", headers={"origin": "http://page.example"})
        assert foreign.status_code == 403 and "--allowed-origins" in foreign.text
        (model / "go").touch()
        server.wait_ready()
        assert [client.get(path).status_code for path in ("/live", "/below/ready", "/health")] == [200, 200, 200]
        assert text_of(client) == "one two three"
        assert client.get("/below/v1/models").json() == client.get("/v1/models").json()
        children = server.children()
        assert len(children) == 2
        [api_server] = server.children("server.api_server")
        assert "jaxlib" not in Path(f"/proc/{api_server}/maps").read_text()

        with server.client() as leaving, streaming(leaving):
            assert num_running(client) == 1
        start = time.monotonic()
        wait_until(lambda: num_running(client) == 0, "the request of a client that went away runs on")
        assert time.monotonic() - start < PROMPTLY

        with streaming(client, max_tokens=2000) as lines, server.client() as other:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: other.get("/ready").status_code == 503, "it does not drain")
            refused = other.post("/v1/completions", json=PROMPT)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
            assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
            assert other.get("/live").status_code == other.get("/health").status_code == 200
            assert last_event(lines)["choices"][0]["finish_reason"] == "length", "a running request was not let to its end"
        assert server.end() == 0
        server.assert_nothing_left(children)


def test_what_does_not_end_in_time_is_aborted_with_a_last_event(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, shutdown_timeout=0.2, **OPTIONS) as server, server.wait_ready().client() as client:
        children = server.children()
        with streaming(client) as lines:
            start = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            assert last_event(lines)["error"]["code"] == "aborted"
        assert server.end() == 0 and time.monotonic() - start < PROMPTLY
        server.assert_nothing_left(children)


def test_the_engine_s_death_reaches_every_client_and_what_outlives_it_does_not_outlive_the_supervisor(
    model: Path, tmp_path: Path
) -> None:
    with (
        serving(model, tmp_path, keep_alive_on_engine_death=True, stall_timeout=1.0, **OPTIONS) as server,
        server.wait_ready().client() as client,
        contextlib.ExitStack() as stack,
    ):
        with concurrent.futures.ThreadPoolExecutor() as threads:
            held = threads.submit(client.post, "/v1/completions", json={**PROMPT, "prompt": "hold it"})
            wait_until(lambda: client.get("/ready").status_code == 503, "the engine that holds its interpreter stays ready")
            reply = client.get("/health")
            assert reply.status_code == 200 and reply.json()["status"] == "stalled" and not held.done()
            wait_until(lambda: client.get("/ready").status_code == 200, "it does not become ready again")
            assert held.result(30).status_code == 200
        assert "seems to hang" in server.log()
        streams = [stack.enter_context(streaming(client)) for _ in range(10)]
        [engine] = server.children("engine.process")
        start = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            events = list(threads.map(last_event, streams))
        assert time.monotonic() - start < PROMPTLY
        assert all(event["error"]["code"] == "engine_dead" for event in events)
        wait_until(lambda: "the server goes on" in server.log(), "the supervisor has not noticed")
        refused = client.post("/v1/completions", json=PROMPT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert [client.get(path).status_code for path in ("/health", "/ready", "/live")] == [503, 503, 200]
        [api_server] = server.children("server.api_server")
        server.process.kill()
        wait_until(lambda: not is_alive(api_server), "an orphan is left")


def test_killed_api_servers_are_replaced_and_their_requests_end_and_a_second_signal_stops_at_once(
    model: Path, tmp_path: Path
) -> None:
    with serving(model, tmp_path, port=0, api_server_count=2, **OPTIONS) as server, contextlib.ExitStack() as stack:
        server.wait_ready()
        clients = [stack.enter_context(server.client()) for _ in range(4)]
        api_servers = server.children("server.api_server")
        assert len(api_servers) == 2
        for client in clients:
            stack.enter_context(streaming(client))
        for api_server in api_servers:
            os.kill(api_server, signal.SIGKILL)
        wait_until(lambda: not set(api_servers) & set(server.children("server.api_server")), "the API servers live on")
        wait_until(lambda: len(server.children("server.api_server")) == 2, "no API server was started again")
        for _ in range(4):  # also those of its clients that come before it is ready are answered by it
            with server.client() as client:
                wait_until(lambda client=client: client.get("/ready").status_code == 200, "an API server does not serve")  # type: ignore[misc]
                assert text_of(client) == "one two three"
                assert num_running(client) == 0, "requests of a killed API server run on"
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "a second signal" in server.log(), "the first signal was not taken")
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM and time.monotonic() - start < PROMPTLY
        server.assert_nothing_left(children)


def test_a_port_in_use_is_said_with_its_owner_and_another_is_suggested(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, serving(model, tmp_path, port=taken.getsockname()[1]) as server:
        assert server.end() == 1
        assert f"(process {os.getpid()})" in server.log() and "--port" in server.log()


def test_an_engine_that_cannot_start_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    for name in ("go", "bad"):
        (model / name).touch()
    with serving(model, tmp_path, core_factory=SLOW_FACTORY) as server:
        assert server.end() == 1
        assert "error: the weights are torn" in server.log()
        assert not list(server.temporary.iterdir())


def test_a_killed_supervisor_leaves_no_process_and_no_directory(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, **OPTIONS) as server:
        children = server.wait_ready().children()
        server.process.kill()
        wait_until(lambda: not any(map(is_alive, children)), "an orphan is left")
        assert not list(server.temporary.iterdir())


def test_an_api_server_that_cannot_start_ends_the_server_with_the_reason(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, tool_call_parser="nobody's", core_factory=SLOW_FACTORY) as server:  # it never loads
        assert server.end() == 1
        assert "error: --tool-call-parser nobody's is unknown" in server.log()


@pytest.mark.newer
def test_the_command_serves_the_demo_model_and_ends_with_its_engine(tmp_path: Path) -> None:
    with serving(
        "demo", tmp_path, command=("serve", "--max-num-seqs", "2", "--max-model-len", "256", "--warmup", "lazy")
    ) as server:
        wait_until(lambda: "curl --unix-socket" in server.log(), "the first screen does not come")
        assert "demo is served at the Unix socket" in server.log() and "ready in" in server.log()
        children = server.children()
        with server.client() as client:
            reply = client.post("/v1/completions", json={"prompt": "import ", "max_tokens": 3, "temperature": 0})
            assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3
            [engine] = server.children("engine.process")
            os.kill(engine, signal.SIGKILL)
            assert server.end() == 1
            server.assert_nothing_left(children)
        assert "error: the engine process has ended; its log may say why (signal 9: Killed)" in server.log()
