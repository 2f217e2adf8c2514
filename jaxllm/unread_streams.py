"""Holds requests in the engine whose outputs their callers do not fetch, so that others get their places meanwhile."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from jaxllm.errors import EngineError
from jaxllm.mailbox import Mailbox

TICK_SECONDS = 1.0
HOLD_TICKS = 5
"""Ticks in a row that outputs lie unfetched before their request is held. Ticks, not seconds: an event loop that stalls has few."""


class UnreadStreams:
    """Lives in the event loop of the callers. `call` runs a control call of the engine core."""

    def __init__(self, call: Callable[[str, list[str]], Awaitable[None]]):
        self.num_held = 0
        """Times that a request was held."""
        self._call = call
        self._request_ids: dict[Mailbox, list[str]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def watch(self, mailbox: Mailbox, request_ids: list[str]) -> None:
        """Hold these requests while their mailbox is not emptied."""
        self._request_ids[mailbox] = request_ids
        if self._timer is None:
            self._timer = mailbox.loop.call_later(TICK_SECONDS, self._tick)

    def forget(self, mailbox: Mailbox) -> None:
        """The stream of a mailbox ended."""
        self._request_ids.pop(mailbox, None)

    def release(self, mailbox: Mailbox) -> None:
        """Continue requests that were held: their caller fetches again."""
        mailbox.is_held = False
        self._send("release_requests", mailbox)

    def _tick(self) -> None:
        self._timer = None
        for mailbox in self._request_ids:
            if not mailbox.is_unread:
                continue
            mailbox.num_ticks_unread += 1
            if mailbox.num_ticks_unread >= HOLD_TICKS and not mailbox.is_held and not mailbox.is_done:
                mailbox.is_held = True
                self.num_held += 1
                self._send("hold_requests", mailbox)
        if self._request_ids:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _send(self, name: str, mailbox: Mailbox) -> None:
        async def send() -> None:
            with contextlib.suppress(EngineError):  # its requests end, or have ended
                await self._call(name, request_ids)

        request_ids = self._request_ids[mailbox]
        task = asyncio.ensure_future(send())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
