"""The conversation of `jaxllm chat`, and its subclass for a model in this process."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

from jaxllm.cli import running, terminal
from jaxllm.cli.streaming import Answer, stream
from jaxllm.errors import EngineError
from jaxllm.lora_request import LoRARequest
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


class Conversation(abc.ABC):
    """The messages so far and the sampling values; subclasses produce the answers."""

    keeps_messages = True
    """Whether an answer depends on the messages before it."""

    def __init__(self, sampling: dict[str, Any], *, quiet: bool):
        self.messages: list[dict[str, Any]] = []
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
        asked, answer = [*self.messages, {"role": "user", "content": text}], Answer()
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
        """Remove all messages but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]


class LocalConversation(Conversation):
    """A conversation with a model in this process."""

    def __init__(self, llm: "LLM", sampling: dict[str, Any], *, quiet: bool, lora_request: LoRARequest | None = None):
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
