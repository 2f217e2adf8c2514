"""Reads the bodies of requests: within the limits of size and time, and of what all bodies together may take of memory."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, overloaded
from server.options import LimitOptions
from server.work import LARGE_BYTES, ORIGIN, Origin

LARGE_BODIES = 8
"""Maximum number of bodies of the largest size in memory; half as many of one client."""


class BodyMemory:
    """Memory of large bodies until their answers begin. Those that do not fit wait, and nothing of them is read."""

    def __init__(self, limits: LimitOptions):
        self.max_bytes = LARGE_BODIES * limits.max_request_body_bytes
        self._wait_seconds = limits.request_body_timeout
        self._held: dict[str, int] = {}
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()

    async def take(self, client: str, num_bytes: int) -> Callable[[], None]:
        """Wait for memory, and take it; returns what gives it back. Raises ApiError after some time."""
        if self._fits(client, num_bytes):
            self._add(client, num_bytes)
        else:
            await self._wait(client, num_bytes)
        is_held = True

        def give_back() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._return(client, num_bytes)

        return give_back

    def _fits(self, client: str, num_bytes: int) -> bool:
        mine = self._held.get(client, 0) + num_bytes
        return mine <= self.max_bytes // 2 and sum(self._held.values()) + num_bytes <= self.max_bytes

    def _add(self, client: str, num_bytes: int) -> None:
        self._held[client] = self._held.get(client, 0) + num_bytes
        if not self._held[client]:
            del self._held[client]

    async def _wait(self, client: str, num_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (client, num_bytes, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._return(client, num_bytes)
            elif entry in self._waiting:
                self._waiting.remove(entry)
            if isinstance(error, TimeoutError):
                raise overloaded(
                    "other large requests take the memory that there is for their bodies; try again later"
                ) from None
            raise

    def _return(self, client: str, num_bytes: int) -> None:
        self._add(client, -num_bytes)
        for entry in list(self._waiting):
            client, num_bytes, turn = entry
            if not turn.done() and self._fits(client, num_bytes):
                self._waiting.remove(entry)
                self._add(client, num_bytes)
                turn.set_result(None)


class Body:
    """A body that has arrived."""

    def __init__(self, data: bytes, give_back: Callable[[], None] | None = None, client: str = ""):
        self._messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        self._give_back = give_back
        self._origin = Origin(client, len(data))

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with it. For a large one: until the answer begins, and end that if the client leaves before."""
        give_back = self._give_back
        if give_back is None:
            await app(scope, self._before(receive), send)
            return
        has_begun, is_gone = False, asyncio.Event()

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            give_back()
            await send(message)

        async def disconnect() -> Message:
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone.set()

        ORIGIN.set(self._origin)
        task = asyncio.ensure_future(app(scope, self._before(disconnect), send_on))
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() or has_begun:
                await task
        finally:
            watching.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            give_back()

    def _before(self, receive: Receive) -> Receive:
        """A `receive` that has the body first."""

        async def replay() -> Message:
            return self._messages.pop() if self._messages else await receive()

        return replay


class BodyReader:
    """Reads bodies within the limits."""

    def __init__(self, limits: LimitOptions):
        self._max_bytes, self._seconds = limits.max_request_body_bytes, limits.request_body_timeout
        self._memory = BodyMemory(limits)

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive, client: str) -> Body | None:
        """The body of a request; None: it has none. `client`: who sends it. Raises ApiError."""
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return None
        if length is not None and (not length.isdigit() or len(length) > 18):
            raise ApiError(400, "content-length is not a number of bytes")
        if length is not None and int(length) > self._max_bytes:
            raise _too_large(self._max_bytes)
        if length is not None and int(length) < LARGE_BYTES:
            return Body(await self._whole(receive))
        give_back = await self._memory.take(client, self._max_bytes if length is None else int(length))
        try:
            return Body(await self._whole(receive), give_back, client)
        except BaseException:
            give_back()
            raise

    async def _whole(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                return await _read(receive, self._max_bytes)
        except TimeoutError:
            raise ApiError(408, "the request's body did not arrive in time", code="timeout", retry=False) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (--max-request-body-bytes)", code="body_too_large")


async def _read(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left before its body was complete")
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)
