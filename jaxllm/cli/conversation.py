"""The conversation of `jaxllm chat`, and its subclass for a model in this process."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

from jaxllm.cli import running, terminal
from jaxllm.cli.streaming import stream
from jaxllm.errors import EngineError
from jaxllm.lora_request import LoRARequest
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


class Conversation(abc.ABC):
    """The messages so far and the sampling values; subclasses produce the answers."""

    def __init__(self, sampling: dict[str, Any], *, quiet: bool):
        self.messages: list[dict[str, Any]] = []
        self.sampling = sampling
        self.quiet = quiet

    @abc.abstractmethod
    def values(self) -> dict[str, Any]:
        """The sampling values of the next answer, as far as the client has them."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise InvalidRequestError for an invalid value from /set."""

    @abc.abstractmethod
    def answer(self, text: str) -> None:
        """Stream the answer to a message to the terminal, and store both. Ctrl-C ends the answer and keeps its text so far."""

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def keep(self, asked: list[dict[str, Any]], answer: str, stats: terminal.RunStats, *, finished: bool) -> None:
        """Store the answer, and print its speed."""
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        if not self.quiet:
            terminal.note(stats.line() + ("" if finished else " (stopped)"))


class LocalConversation(Conversation):
    """A conversation with a model in this process."""

    def __init__(self, llm: "LLM", sampling: dict[str, Any], *, quiet: bool, lora_request: LoRARequest | None = None):
        super().__init__(sampling, quiet=quiet)
        self._llm, self._lora_request = llm, lora_request
        self._base = dataclasses.replace(running.chat_sampling(llm), max_tokens=None)

    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self._params())

    def check(self) -> None:
        self._params()

    def answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._llm.render_conversations(asked)[0]
        streamed = stream(self._llm, prompt, self._params(), lora_request=self._lora_request)
        if streamed.fault is not None:
            raise EngineError(streamed.fault)
        self.keep(asked, streamed.text, streamed.stats, finished=streamed.finished)

    def _params(self) -> SamplingParams:
        return dataclasses.replace(self._base, **self.sampling, output_kind=RequestOutputKind.DELTA)
