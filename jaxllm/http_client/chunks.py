"""Chunks of a streamed completion or chat answer; unused fields are skipped unparsed."""

from typing import Any

import msgspec

DONE = b"[DONE]"


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int | None = 0
    id: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, frozen=True):
    """New text of a chat message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name of `reasoning`."""
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None

    @property
    def thought(self) -> str:
        """The new text of the reasoning."""
        return self.reasoning or self.reasoning_content or ""


class Choice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk: `text` in completions, `delta` in chat."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def visible(self) -> str:
        """The text, without reasoning and tool calls."""
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def only_opens(self) -> bool:
        """Whether it is the empty first chunk of a chat answer, which stands for no token."""
        delta = self.delta
        return (
            delta is not None
            and self.finish_reason is None
            and not (delta.content or delta.thought or delta.tool_calls or delta.refusal)
        )


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(Chunk)


def read_chunk(event: bytes) -> Chunk:
    """Parse the chunk in an event's data. Raises ValueError that names the error."""
    try:
        return _DECODER.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{error} in {event[:200]!r}") from None
