"""The conversation of `jaxllm chat`, with a model in this process or of a server, and the texts of `jaxllm complete`."""

import abc
import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.cli import running, terminal
from jaxllm.cli.images import with_images
from jaxllm.cli.streaming import Answer, printable, stream
from jaxllm.errors import EngineError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.http_client.chunks import Chunk
    from jaxllm.http_client.client import ServerClient
    from jaxllm.llm import LLM
    from jaxllm.lora_request import LoRARequest


class Conversation(abc.ABC):
    """The messages so far and the sampling values; subclasses produce the answers."""

    keeps_messages = True
    """Whether an answer depends on the messages before it."""

    def __init__(self, sampling: dict[str, Any], *, quiet: bool):
        self.messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []
        """Parts of the next message, before its text."""
        self.sampling = sampling
        self.quiet = quiet

    @abc.abstractmethod
    def values(self) -> dict[str, Any]:
        """The sampling values of the next answer, as far as the client has them. Raises InvalidRequestError for an invalid one."""

    @abc.abstractmethod
    def produce(self, messages: list[dict[str, Any]], answer: Answer) -> None:
        """Stream the answer to the last message to the terminal."""

    def answer(self, text: str) -> None:
        """Answer a message, store both, and print the speed. Ctrl-C ends the answer and keeps its text so far."""
        asked, answer = [*self.messages, with_images({"role": "user", "content": text}, self.images)], Answer()
        self.images = []  # also if the model refuses them
        self.produce(asked, answer)
        if answer.fault is not None:
            raise EngineError(answer.fault)
        if self.keeps_messages:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if not self.quiet:
            terminal.note(answer.stats.line() + ("" if answer.finished else " (stopped)"))

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    def reset(self) -> None:
        """Remove all messages but the system message, and the images of the next."""
        self.images = []
        self.messages = [message for message in self.messages if message["role"] == "system"]


class LocalConversation(Conversation):
    """A conversation with a model in this process."""

    def __init__(self, llm: "LLM", sampling: dict[str, Any], *, quiet: bool, lora_request: "LoRARequest | None" = None):
        super().__init__(sampling, quiet=quiet)
        self._llm, self._lora_request = llm, lora_request
        self._base = dataclasses.replace(running.chat_sampling(llm), max_tokens=None)

    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self._params())

    def produce(self, messages: list[dict[str, Any]], answer: Answer) -> None:
        prompt = self._llm.render_conversations(messages)[0]
        stream(self._llm, prompt, self._params(), answer, self._lora_request)

    def _params(self) -> SamplingParams:
        return dataclasses.replace(self._base, **self.sampling, output_kind=RequestOutputKind.DELTA)


@contextlib.contextmanager
def connected(client: "ServerClient") -> Iterator[asyncio.Runner]:
    """Open the client, with a loop that runs its calls; Ctrl-C ends a call."""
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            yield runner
        finally:
            runner.run(client.__aexit__())


class ServerConversation(Conversation):
    """The messages so far, and a connected client of the server.

    `model` is the name in requests; None: the first that the server lists. Raises ServerError or ConfigError.
    """

    def __init__(
        self, client: "ServerClient", runner: asyncio.Runner, model: str | None, sampling: dict[str, Any], *, quiet: bool
    ):
        super().__init__(sampling, quiet=quiet)
        self._client, self._runner = client, runner
        card = runner.run(client.model_card(model))
        self.model: str = card["id"]
        own = card.get("chat_sampling")
        self._defaults: dict[str, Any] = own if isinstance(own, dict) else {}
        """The server's sampling defaults for interactive chats; its API for chats has others."""

    def values(self) -> dict[str, Any]:
        SamplingParams(**self.sampling)
        return {**self._defaults, **self.sampling}

    def produce(self, messages: list[dict[str, Any]], answer: Answer) -> None:
        with answer.arriving():
            self._runner.run(self._stream(*self._request(messages), answer))

    def _request(self, messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        """The path, and the fields of the body that depend on it."""
        values = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in self.values().items()}
        return "/v1/chat/completions", {"messages": messages} | values

    async def _stream(self, path: str, values: dict[str, Any], answer: Answer) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | given
        async with contextlib.aclosing(self._client.stream(path, msgspec.json.encode(body))) as pieces:
            async for chunks in pieces:
                for chunk in chunks:
                    _add(chunk, answer)
        answer.finished = True


class ServerCompletions(ServerConversation):
    """Continues each text separately; keeps no context for the next."""

    keeps_messages = False

    def _request(self, messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {"prompt": messages[-1]["content"]} | self.sampling


def _add(chunk: "Chunk", answer: Answer) -> None:
    stats = answer.stats
    if chunk.usage is not None:
        stats.num_prompt_tokens = chunk.usage.prompt_tokens or stats.num_prompt_tokens
        stats.num_output_tokens = chunk.usage.completion_tokens or stats.num_output_tokens
    for choice in (chunk.choices or [])[:1]:
        if not choice.only_opens:
            answer.note_token()
        if choice.delta is not None and (thought := printable(choice.delta.thought)):
            answer.add_thought(thought)
        if text := choice.visible:
            answer.add(text, printable(text))
