"""Requests observed to their end: how each ended, from its client's view, and when."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxllm.http_client.chunks import DONE
from jaxllm.http_client.sse import EventParser

WHOLE = "whole"
CLOSED = "connection closed"
REFUSED = "connection refused"
LEFT = "left"


@dataclass
class Stream:
    """One completion, streamed or not. Times are those of `time.monotonic`."""

    body: dict[str, Any] = field(repr=False)
    leaves_after_seconds: float | None = None
    """When its client closes the connection; None: never."""
    outcome: str = ""
    """WHOLE, CLOSED, REFUSED, LEFT, "error event CODE" or "STATUS CODE"."""
    num_events: int = 0
    last_output: float = 0.0
    end: float = 0.0

    def take(self, event: bytes) -> None:
        """An event of the stream, or the whole answer, has come."""
        self.num_events += 1
        self.last_output = time.monotonic()


def alike(count: int, num_tokens: int) -> list[Stream]:
    """Streams of so many tokens."""
    body = {"prompt": "import ", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return [Stream(body) for _ in range(count)]


class Streams:
    """Requests that are sent at the same time."""

    def __init__(self, url: str, streams: Sequence[Stream]):
        self.streams = streams
        self._url = url
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch_all())

    async def begun(self, timeout_seconds: float = 60.0) -> None:
        """Until each has a first token or has ended."""
        async with asyncio.timeout(timeout_seconds):
            while not all(stream.num_events or stream.outcome for stream in self.streams):
                await asyncio.sleep(0.005)

    async def ended(self, timeout_seconds: float = 120.0) -> None:
        """Until all have ended."""
        assert self._task is not None
        async with asyncio.timeout(timeout_seconds):
            await self._task

    def counts(self) -> Counter[str]:
        return Counter(stream.outcome for stream in self.streams)

    @property
    def last_output(self) -> float:
        return max(stream.last_output for stream in self.streams)

    @property
    def last_failure(self) -> float:
        """When the last client that stayed knew that its answer will not be whole; 0 if all are."""
        return max((stream.end for stream in self.streams if stream.outcome not in (WHOLE, LEFT)), default=0.0)

    async def _watch_all(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            await asyncio.gather(*(self._watch(session, stream) for stream in self.streams))

    async def _watch(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        try:
            async with (
                asyncio.timeout(stream.leaves_after_seconds),
                session.post(f"{self._url}/v1/completions", json=stream.body) as reply,
            ):
                if reply.status != 200:
                    stream.outcome = f"{reply.status} {_code(await reply.read())}"
                elif stream.body["stream"]:
                    stream.outcome = await self._follow(reply, stream)
                else:
                    stream.take(await reply.read())
                    stream.outcome = WHOLE
        except TimeoutError:
            stream.outcome = LEFT
        except aiohttp.ClientConnectorError:
            stream.outcome = REFUSED
        except (aiohttp.ClientError, ConnectionError):
            stream.outcome = CLOSED
        stream.end = time.monotonic()

    async def _follow(self, reply: aiohttp.ClientResponse, stream: Stream) -> str:
        parser = EventParser()
        async for piece in reply.content.iter_any():
            for event in parser.feed(piece):
                if event == DONE:
                    return WHOLE
                if b'"error"' in event and (code := _code(event)):
                    return f"error event {code}"
                stream.take(event)
        return CLOSED


def _code(body: bytes) -> str:
    """The code of an error in OpenAI's envelope; nothing if it is none."""
    try:
        error = json.loads(body).get("error") or {}
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, AttributeError):
        return ""


def told(counts: Counter[str]) -> str:
    """`20 × whole, 12 × 503 overloaded`"""
    return ", ".join(f"{count} × {outcome}" for outcome, count in counts.most_common())


def is_among(counts: Counter[str], allowed: Sequence[str]) -> bool:
    return set(counts) <= set(allowed)
