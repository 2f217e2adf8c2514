"""Sends requests to an ASGI application in this process, without a socket."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope


@dataclass(frozen=True)
class Reply:
    """The application's answer."""

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Reply:
    """POST a JSON body and wait for the whole answer; the client never disconnects."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("localhost", 0),
        "server": ("localhost", 0),
        "state": {},
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, answered, pieces = 500, {}, []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    async def send(message: Message) -> None:
        nonlocal status, answered
        if message["type"] == "http.response.start":
            status = message["status"]
            answered = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return Reply(status, answered, b"".join(pieces))
