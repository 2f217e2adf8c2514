"""The time limit of a request, shared by all its parts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from types import TracebackType
from typing import TypeVar

from server.errors import ApiError

Piece = TypeVar("Piece")


class Deadline(AbstractAsyncContextManager["Deadline"]):
    """Ends its block with a 408 that many seconds from now (None: never). Reusable: every use has the same deadline."""

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._when = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> "Deadline":
        self._timeout = asyncio.timeout_at(self._when)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._timeout is not None
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ApiError(
                408, f"the request took longer than its time limit of {self._seconds:g} s", code="timeout", retry=False
            ) from None

    async def applied(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """Yield the items, each of which must arrive before the deadline."""
        async with aclosing(pieces):
            if self._when is None:
                async for piece in pieces:
                    yield piece
                return
            while True:
                async with self:
                    try:
                        piece = await anext(pieces)
                    except StopAsyncIteration:
                        return
                yield piece
