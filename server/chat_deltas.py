"""Increments of the answers of a conversation, shared by all chat APIs."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxllm.outputs import Logprob
from server.dialects import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart


@dataclass(slots=True)
class ToolCallDelta:
    """A part of a tool call: the first has id and name, all together have the arguments' JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ChatDelta:
    """An increment of one of the n answers. Its parts are ordered: reasoning, content, tool calls."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    """One per token of token_ids."""
    finish_reason: str | None = None
    """stop, length or tool_calls."""
    stop_reason: int | str | None = None


def with_pieces(first: ChatDelta, pieces: list[Delta]) -> list[ChatDelta]:
    """Merge pieces of text into a delta that has no text yet; use more deltas if the order of the pieces requires it.

    The first delta gets the tokens, the last one the finish reason.
    """
    deltas = [first]
    for piece in pieces:
        last = deltas[-1]
        if (isinstance(piece, Reasoning) and (last.content or last.tool_calls)) or (
            isinstance(piece, Content) and last.tool_calls
        ):
            last = ChatDelta(first.index)
            deltas.append(last)
        if isinstance(piece, Reasoning):
            last.reasoning += piece.text
        elif isinstance(piece, Content):
            last.content += piece.text
        elif isinstance(piece, ToolCallStart):
            last.tool_calls.append(ToolCallDelta(piece.index, piece.id, piece.name))
        elif isinstance(piece, ToolCallArguments):
            if last.tool_calls and last.tool_calls[-1].index == piece.index:
                last.tool_calls[-1].arguments += piece.text
            else:
                last.tool_calls.append(ToolCallDelta(piece.index, arguments=piece.text))
    if len(deltas) > 1:
        deltas[-1].finish_reason, deltas[-1].stop_reason = first.finish_reason, first.stop_reason
        first.finish_reason = first.stop_reason = None
    return deltas


def joined(earlier: ChatDelta, later: ChatDelta) -> ChatDelta:
    """Merge two deltas of one answer."""
    calls = {call.index: dataclasses.replace(call) for call in earlier.tool_calls}
    for call in later.tool_calls:
        if call.index in calls:
            calls[call.index].arguments += call.arguments
        else:
            calls[call.index] = dataclasses.replace(call)
    return ChatDelta(
        earlier.index,
        earlier.content + later.content,
        earlier.reasoning + later.reasoning,
        list(calls.values()),
        [*earlier.token_ids, *later.token_ids],
        earlier.logprobs if later.logprobs is None else [*(earlier.logprobs or []), *later.logprobs],
        later.finish_reason,
        later.stop_reason,
    )


def join_into(answers: dict[int, ChatDelta], deltas: Iterable[ChatDelta]) -> None:
    """Merge deltas into the answers by index."""
    for delta in deltas:
        answers[delta.index] = delta if delta.index not in answers else joined(answers[delta.index], delta)
