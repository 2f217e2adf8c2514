"""The kinds of request that a soak mixes: valid ones of every sort, invalid ones, and clients that disconnect."""

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxllm.http_client.chunks import DONE, read_chunk
from jaxllm.http_client.sse import EventParser

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class UnexpectedError(Exception):
    """The server did not do what this kind of request must get."""


@dataclass(frozen=True)
class Asker:
    """Parts of a request."""

    session: aiohttp.ClientSession
    url: str
    model: str
    rng: random.Random

    def post(self, path: str, body: Any) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(self.url + path, data=data, headers={"Content-Type": "application/json"})

    def completion(self, **fields: Any) -> dict[str, Any]:
        first, second = self.rng.randrange(100), self.rng.randrange(100)
        body = {
            "model": self.model,
            "prompt": f"{first} + {second} =",
            "max_tokens": self.rng.randint(1, 24),
            "ignore_eos": True,
        }
        return {**body, **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        said = f"What is {self.rng.randrange(100)} + {self.rng.randrange(100)}?"
        body = {"model": self.model, "messages": [{"role": "user", "content": said}], "max_completion_tokens": 16}
        return {**body, **fields}


async def whole(asker: Asker, path: str, body: Any) -> None:
    """A plain request that must succeed."""
    async with asker.post(path, body) as response:
        content = await response.json()
        if response.status != 200 or not content.get("choices"):
            raise UnexpectedError(f"HTTP {response.status}: {content}")


async def stream(asker: Asker, path: str, body: dict[str, Any]) -> None:
    """A stream that must end with [DONE], a finish reason for each answer, and the usage."""
    parser, events = EventParser(), []
    async with asker.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
        if response.status != 200:
            raise UnexpectedError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for piece in response.content.iter_any():
            events += parser.feed(piece)
    if not events or events[-1] != DONE:
        raise UnexpectedError("the stream did not end with [DONE]")
    chunks = [read_chunk(event) for event in events[:-1]]
    if faults := [chunk.error for chunk in chunks if chunk.error is not None]:
        raise UnexpectedError(f"error in the stream: {faults[0]}")
    finished = {choice.index for chunk in chunks for choice in chunk.choices or [] if choice.finish_reason is not None}
    if finished != set(range(body.get("n", 1))) or chunks[-1].usage is None:
        raise UnexpectedError(f"a stream of {body.get('n', 1)} answers ended with finish reasons for {sorted(finished)}")


async def gone_in_stream(asker: Asker, path: str, body: dict[str, Any]) -> None:
    """A client that reads the beginning of a stream and leaves."""
    async with asker.post(path, {**body, "stream": True}) as response:
        await response.content.readany()
        response.close()


async def gone_at_once(asker: Asker, path: str, body: dict[str, Any]) -> None:
    """A client that leaves before there is an answer."""
    patience = aiohttp.ClientTimeout(total=asker.rng.uniform(0.001, 0.02))
    try:
        async with asker.session.post(asker.url + path, json=body, timeout=patience) as response:
            await response.read()
    except TimeoutError:
        return


def refused(status: int) -> Callable[[Asker, str, Any], Awaitable[None]]:
    """A request that must get this status and OpenAI's error body."""

    async def ask(asker: Asker, path: str, body: Any) -> None:
        async with asker.post(path, body) as response:
            content = await response.json()
            if response.status != status or not content.get("error", {}).get("message"):
                raise UnexpectedError(f"HTTP {response.status} instead of {status}: {content}")

    return ask


@dataclass(frozen=True)
class Kind:
    """How often a kind comes, and how it goes."""

    weight: int
    path: str
    ask: Callable[[Asker, str, Any], Awaitable[None]]
    body: Callable[[Asker], Any]


KINDS: Mapping[str, Kind] = {
    "completion": Kind(14, COMPLETIONS, whole, lambda a: a.completion()),
    "completion, stream": Kind(18, COMPLETIONS, stream, lambda a: a.completion()),
    "completion, n = 3": Kind(4, COMPLETIONS, stream, lambda a: a.completion(n=3, temperature=1.0, seed=7)),
    "completion, logprobs": Kind(4, COMPLETIONS, whole, lambda a: a.completion(logprobs=3, echo=False)),
    "completion, token ids": Kind(4, COMPLETIONS, whole, lambda a: a.completion(prompt=a.rng.choices(range(3, 13), k=40))),
    "completion, stop": Kind(4, COMPLETIONS, whole, lambda a: a.completion(stop=["7", "\n"], ignore_eos=False)),
    "completion, long": Kind(2, COMPLETIONS, stream, lambda a: a.completion(prompt="x = 1\n" * 60, max_tokens=64)),
    "chat": Kind(10, CHAT, whole, lambda a: a.chat()),
    "chat, stream": Kind(14, CHAT, stream, lambda a: a.chat()),
    "client gone in stream": Kind(8, COMPLETIONS, gone_in_stream, lambda a: a.completion(max_tokens=64)),
    "client gone at once": Kind(4, CHAT, gone_at_once, lambda a: a.chat()),
    "not JSON": Kind(2, CHAT, refused(400), lambda a: b'{"model": '),
    "bad temperature": Kind(3, CHAT, refused(400), lambda a: a.chat(temperature=-1)),
    "no such model": Kind(2, CHAT, refused(404), lambda a: {**a.chat(), "model": "no-such-model"}),
    "unknown path": Kind(1, "/v1/no-such-path", refused(404), lambda a: {}),
    "too long": Kind(2, COMPLETIONS, refused(400), lambda a: a.completion(prompt="word " * 50_000)),
}


def choose(rng: random.Random, count: int) -> list[str]:
    """So many kinds, drawn by their weights."""
    return rng.choices(list(KINDS), weights=[kind.weight for kind in KINDS.values()], k=count)
