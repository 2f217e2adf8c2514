"""Conversations of `jaxllm chat --url` and texts of `jaxllm complete`, answered by a running server."""

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxllm.cli import terminal
from jaxllm.cli.conversation import Conversation
from jaxllm.errors import ConfigError
from jaxllm.http_client.chunks import Chunk
from jaxllm.http_client.client import ServerClient, ServerError
from jaxllm.sampling_params import SamplingParams

PATH = "/v1/chat/completions"
NAMES_OF_SERVERS: Mapping[str, str] = {"max_tokens": "max_completion_tokens"}
"""Sampling values with another name in a chat request."""
_TERMINAL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class _Answer:
    text: str = ""
    thought: str = ""
    finished: bool = False
    stats: terminal.RunStats = field(default_factory=terminal.RunStats)


class ServerConversation(Conversation):
    """The messages so far, and a client of the server. Use as a context manager.

    `model` is the name in requests; None: the first that the server lists. Raises ServerError or ConfigError.
    """

    def __init__(self, client: ServerClient, model: str | None, sampling: dict[str, Any], *, quiet: bool):
        super().__init__(sampling, quiet=quiet)
        self._client = client
        self._runner = asyncio.Runner()
        try:
            self._runner.run(client.__aenter__())
            card = self._runner.run(self._card_of(model))
        except BaseException:
            self.close()
            raise
        self.model: str = card["id"]
        own = card.get("chat_sampling")
        self._defaults: dict[str, Any] = own if isinstance(own, dict) else {}
        """The server's sampling defaults for interactive chats; its API for chats has others."""

    def __enter__(self) -> "ServerConversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._runner.run(self._client.__aexit__())
        self._runner.close()

    def values(self) -> dict[str, Any]:
        """The sampling values set here or told by the server, which has defaults for the others."""
        return {**self._defaults, **self.sampling}

    def check(self) -> None:
        SamplingParams(**self.sampling)

    def answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = _Answer()
        began = time.perf_counter()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self._runner.run(self._stream(asked, answer, began))
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        answer.stats.total_seconds = time.perf_counter() - began
        self.keep(asked, answer.text, answer.stats, finished=answer.finished)

    def _request(self, asked: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        """The path, and the fields of the body that depend on it."""
        values = {NAMES_OF_SERVERS.get(name, name): value for name, value in self.values().items() if value is not None}
        return PATH, {"messages": asked} | values

    async def _stream(self, asked: list[dict[str, Any]], answer: _Answer, began: float) -> None:
        path, values = self._request(asked)
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | values
        async with contextlib.aclosing(self._client.stream(path, msgspec.json.encode(body))) as pieces:
            async for chunks in pieces:
                for chunk in chunks:
                    self._show(chunk, answer, began)
        answer.finished = True

    def _show(self, chunk: Chunk, answer: _Answer, began: float) -> None:
        stats = answer.stats
        if chunk.usage is not None:
            stats.num_prompt_tokens = chunk.usage.prompt_tokens or stats.num_prompt_tokens
            stats.num_output_tokens = chunk.usage.completion_tokens or stats.num_output_tokens
        for choice in (chunk.choices or [])[:1]:
            if not choice.only_opens and not stats.first_token_seconds:
                stats.first_token_seconds = [time.perf_counter() - began]
            if choice.delta is not None and (thought := printable(choice.delta.thought)):
                answer.thought += thought
                print(terminal.styled(thought, "dim", sys.stderr), end="", file=sys.stderr, flush=True)
            if text := choice.visible:
                if answer.thought and not answer.text:
                    print(file=sys.stderr, flush=True)
                answer.text += text
                sys.stdout.write(printable(text))
                sys.stdout.flush()

    async def _card_of(self, model: str | None) -> dict[str, Any]:
        """The server's entry of a model; None: of its first one. Raises ServerError or ConfigError."""
        try:
            cards = await self._client.model_cards()
        except ServerError:
            if model is None:
                raise
            cards = []  # not every server has a list
        if model is not None:
            return next((card for card in cards if card["id"] == model), {"id": model})
        if not cards:
            raise ConfigError("the server lists no models; name one: jaxllm chat --url URL MODEL")
        return cards[0]


class ServerCompletions(ServerConversation):
    """Continues each text separately; keeps no context for the next."""

    def _request(self, asked: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        values = {name: value for name, value in self.sampling.items() if value is not None}
        return "/v1/completions", {"prompt": asked[-1]["content"]} | values

    def keep(self, asked: list[dict[str, Any]], answer: str, stats: terminal.RunStats, *, finished: bool) -> None:
        super().keep([], answer, stats, finished=finished)
        self.messages = []


def printable(text: str) -> str:
    """Remove terminal control codes from untrusted text, except line ends and tabs."""
    return _TERMINAL_CODES.sub("", text)
