"""Server-sent events: replies written piece by piece, cancelled when the client disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.log import logger
from server.error_shapes import shaped
from server.errors import ApiError, as_api_error

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
START_GRACE_SECONDS = 2.0
"""Seconds that the response's status waits for the first piece, so that an error before it gives an HTTP error status."""

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client disconnected; no answer is sent."""


def event(json: bytes) -> bytes:
    """One event."""
    return b"data: %b\n\n" % json


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work; if the client disconnects first, cancel the work and raise ClientDisconnected."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each


class EventStream(Response):
    """A reply whose body is an async iterator of bytes, each of one or more whole events.

    An error before the first piece is answered with its status; a later one becomes the last event. The iterator is closed
    when the client disconnects. `keep_alive_seconds`: silence after which a comment is sent; 0: never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        keep_alive_seconds: float = 0.0,
        headers: Mapping[str, str] | None = None,
        error_event: Any = None,
    ):
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._pieces = pieces
        self._keep_alive_seconds = keep_alive_seconds
        self._error_event = error_event or (lambda error: event(error.body()) + DONE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (writer, gone):
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            await _close(self._pieces)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = self._pieces
        try:
            first = await self._first(pieces)
        except StopAsyncIteration:
            first = b""
        except Exception as error:
            await shaped(scope, _told(error)).response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            if isinstance(first, asyncio.Future):
                first = await self._with_comments(first, send)
            if first:
                await send({"type": "http.response.body", "body": first, "more_body": True})
            if self._keep_alive_seconds:
                pieces = _Commented(pieces, self, send)
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except StopAsyncIteration:
            pass
        except Exception as error:
            last = self._error_event(shaped(scope, _told(error)))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first(self, pieces: AsyncIterator[bytes]) -> Any:
        """Return the first piece, or its future if it takes long."""
        coming = asyncio.ensure_future(_next(pieces))
        try:
            done, _ = await asyncio.wait({coming}, timeout=START_GRACE_SECONDS)
        except asyncio.CancelledError:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await coming
            raise
        return coming.result() if done else coming

    async def _with_comments(self, coming: "asyncio.Future[bytes]", send: Send) -> bytes:
        """Wait for a pending piece; send comments meanwhile."""
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=self._keep_alive_seconds or None)
                if done:
                    return coming.result()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        except asyncio.CancelledError:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await coming
            raise


class _Commented:
    """Yields pieces, and comments while none comes."""

    def __init__(self, pieces: AsyncIterator[bytes], stream: EventStream, send: Send):
        self._pieces = pieces
        self._stream = stream
        self._send = send

    def __aiter__(self) -> "_Commented":
        return self

    async def __anext__(self) -> bytes:
        coming = asyncio.ensure_future(_next(self._pieces))
        return await self._stream._with_comments(coming, self._send)


async def _next(pieces: AsyncIterator[bytes]) -> bytes:
    return await anext(pieces)  # ensure_future requires a coroutine


async def _close(pieces: AsyncIterator[bytes]) -> None:
    close: Awaitable[None] | None = pieces.aclose() if hasattr(pieces, "aclose") else None
    if close is not None:
        await close


def _told(error: Exception) -> ApiError:
    told = as_api_error(error)
    if told.status >= 500 and told.code == "internal_error":
        logger.error("a stream failed", exc_info=error)
    return told
