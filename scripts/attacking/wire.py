"""Requests as attackers send them: any bytes over a socket, and answers as far as they came."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN: Mapping[str, Any] = {"prompt": "import ", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
"""A small request that everyone may send."""
SILENCE_SECONDS = 0.5
STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3})", re.MULTILINE)


class HasPort(Protocol):
    port: int


@dataclass(frozen=True)
class Answer:
    """Responses of the server."""

    status: int = 0
    """0: no answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes = b""
    seconds: float = 0.0

    @property
    def statuses(self) -> list[int]:
        """Status codes of all responses on the connection."""
        return [int(found) for found in STATUS.findall(self.raw)]


def connect(server: HasPort, seconds: float = 30) -> socket.socket:
    """A separate connection."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=seconds)


def exchange(server: HasPort, data: bytes, *, seconds: float = 30, is_whole: bool = True) -> Answer:
    """Send bytes, then read until the other end closes, a whole answer is there, or the time is over.

    is_whole: read one answer with the length that its headers announce; else all that comes, until there is silence after it.
    """
    began = time.monotonic()
    received = b""
    with contextlib.suppress(OSError), connect(server, seconds) as stream:
        with contextlib.suppress(OSError):  # refused in the middle, and answered nevertheless
            stream.sendall(data)
        while (left := began + seconds - time.monotonic()) > 0:
            stream.settimeout(min(left, SILENCE_SECONDS) if received and not is_whole else left)
            piece = stream.recv(1 << 16)
            if not piece:
                break
            received += piece
            if is_whole and _is_whole(received):
                break
    return _parsed(received, time.monotonic() - began)


def request(
    server: HasPort,
    method: str,
    path: str,
    body: bytes | Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    seconds: float = 30,
) -> Answer:
    """One request on a separate connection. A mapping is sent as JSON; headers replace those of a plain client."""
    return exchange(server, head_and_body(server, method, path, body, headers), seconds=seconds)


def head_and_body(
    server: HasPort,
    method: str,
    path: str,
    body: bytes | Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of a request that closes its connection."""
    all_headers = {"host": f"127.0.0.1:{server.port}", "connection": "close"}
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    if body is not None or method == "POST":
        all_headers |= {"content-type": "application/json", "content-length": str(len(data))}
    all_headers |= {name.lower(): value for name, value in (headers or {}).items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + data


def get(server: HasPort, path: str, headers: Mapping[str, str] | None = None, *, seconds: float = 30) -> Answer:
    return request(server, "GET", path, None, headers, seconds=seconds)


def post(
    server: HasPort,
    path: str,
    body: bytes | Mapping[str, Any] = b"",
    headers: Mapping[str, str] | None = None,
    *,
    seconds: float = 30,
) -> Answer:
    return request(server, "POST", path, body, headers, seconds=seconds)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"^content-length: *(\d+)", head, re.MULTILINE | re.IGNORECASE)
    return bool(end) and (len(body) >= int(length[1]) if length else received.endswith(b"0\r\n\r\n"))


def _parsed(received: bytes, seconds: float) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    found = STATUS.match(head)
    if found is None:
        return Answer(raw=received, seconds=seconds)
    pairs = (line.partition(":") for line in head.decode("latin-1").splitlines()[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Answer(int(found[1]), headers, body, received, seconds)
