"""Waits for the first update of a stream, so that an immediate failure gives an HTTP error status instead of an event."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

SECONDS = 0.5
"""Seconds to wait: an engine that accepts no more requests reports it before its next step."""

Update = TypeVar("Update")


async def after_early_errors(
    updates: AsyncGenerator[Update, None], seconds: float = SECONDS
) -> AsyncGenerator[Update | None, None]:
    """Yields None, then the updates. None comes with the first update or after the wait; an earlier error is raised instead."""
    async with contextlib.aclosing(updates):
        coming = asyncio.ensure_future(_next(updates))
        try:
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if done:
                coming.result()  # raises the error
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


async def _next(updates: AsyncGenerator[Update, None]) -> tuple[Update | None, bool]:
    """Return the next update and whether the stream ended: a future cannot carry StopAsyncIteration."""
    try:
        return await anext(updates), False
    except StopAsyncIteration:
        return None, True
