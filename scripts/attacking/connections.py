"""Connections that do nothing, or do it slowly."""

import contextlib
import json
import time

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target

_IMPATIENT = ("--request-body-timeout", "3")
_COUNT = 500


def _hold(target: Target, seen: Seen, first: bytes, drip: bytes, seconds: float, *, all_closed: bool) -> None:
    """Open many connections, send some bytes on each, then a few every second."""
    server = target.server(*_IMPATIENT)
    with contextlib.ExitStack() as stack, Bystander(server) as other:
        streams = [stack.enter_context(wire.connect(server)) for _ in range(_COUNT)]
        num_open = _COUNT
        until = time.monotonic() + seconds
        for stream in streams:
            stream.sendall(first)
            stream.setblocking(False)
        while time.monotonic() < until:
            time.sleep(1)
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.send(drip)
        num_open = sum(_is_open(stream) for stream in streams)
    if all_closed:
        seen.equal(f"of {_COUNT} open after {seconds:g} s", num_open, 0)
    other.judge(seen, 2.0)


def _is_open(stream: "wire.socket.socket") -> bool:
    try:
        while stream.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@attack("medium", "500 connections that say nothing")
def idle_connections(target: Target, seen: Seen) -> None:
    _hold(target, seen, b"", b"", 8, all_closed=True)


@attack("medium", "500 connections that send a header a second")
def slow_headers(target: Target, seen: Seen) -> None:
    _hold(target, seen, b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"A: b\r\n", 8, all_closed=True)


@attack("medium", "500 connections that send a byte of a body each second")
def slow_bodies(target: Target, seen: Seen) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    _hold(target, seen, head, b" ", 8, all_closed=True)


@attack("low to medium", "100 bodies of 30 MB of one key that come a byte a second; another key sends 200 KB")
def slow_large_bodies(target: Target, seen: Seen) -> None:
    server = target.server("--api-key", "one", "--api-key", "two")
    head = wire.head_and_body(server, "POST", wire.COMPLETIONS, None, {**wire.bearer("one"), "content-length": "30000000"})
    large = json.dumps({**wire.PLAIN, "prompt": "word " * 40_000}).encode()
    with contextlib.ExitStack() as stack, Bystander(server, "two") as other:
        for _ in range(100):
            stack.enter_context(wire.connect(server)).sendall(head + b"{")
        time.sleep(1)
        answer = wire.post(server, wire.COMPLETIONS, large, wire.bearer("two"), seconds=60)
    seen.status("another's 200 KB", answer.status, 400, 400)
    seen.seconds("after", answer.seconds, 5.0)
    other.judge(seen, 2.0)


@attack("medium", "more connections than --max-connections")
def too_many_connections(target: Target, seen: Seen) -> None:
    server = target.server("--max-connections", "50")
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(wire.connect(server))
        time.sleep(0.3)
        refused = wire.get(server, "/v1/models", seconds=10)
    seen.equal("the next is answered with", refused.status, 503)
    time.sleep(0.5)
    seen.equal("and later with", wire.get(server, "/v1/models").status, 200)
