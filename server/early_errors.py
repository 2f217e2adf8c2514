"""A wait for the first news of a stream, so that what fails at once is a real HTTP status and not an event."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

SECONDS = 0.5
"""An engine that takes no more requests says so before its next step."""

News = TypeVar("News")


async def after_early_errors(
    updates: AsyncGenerator[News, None], seconds: float = SECONDS
) -> AsyncGenerator[News | None, None]:
    """None, then the updates. None comes when the first of them is there or the time is over; an error before raises instead of it."""
    async with contextlib.aclosing(updates):
        coming = asyncio.ensure_future(_next(updates))
        try:
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if done:
                coming.result()  # raises what went wrong
            yield None
            first, is_over = await coming
        finally:
            if not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await coming
        if is_over:
            return
        yield first  # type: ignore[misc]
        async for update in updates:
            yield update


async def _next(updates: AsyncGenerator[News, None]) -> tuple[News | None, bool]:
    """The next update, and whether there was none: a future cannot carry StopAsyncIteration."""
    try:
        return await anext(updates), False
    except StopAsyncIteration:
        return None, True
