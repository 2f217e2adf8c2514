"""A chat service whose answers are given, in place of an engine's."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from server.chat_service import ChatDelta, PreparedChat, ToolCallDelta

REASONED_CALL = [
    ChatDelta(0, reasoning="I must "),
    ChatDelta(0, reasoning="look it up.", content="Let me "),
    ChatDelta(0, content="see."),
    ChatDelta(0, tool_calls=[ToolCallDelta(0, "call_1", "weather", ""), ToolCallDelta(0, arguments='{"city":')]),
    ChatDelta(0, tool_calls=[ToolCallDelta(0, arguments=' "Köln"}'), ToolCallDelta(1, "call_2", "time", "{}")]),
    ChatDelta(0, finish_reason="tool_calls"),
]
"""Thinks, speaks, calls twice."""
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def answer_with(monkeypatch: Any, app: Any, deltas: Sequence[ChatDelta | Exception]) -> list[PreparedChat]:
    """Let the application answer with these deltas, or fail where an error stands. Returns the conversations that come."""
    asked: list[PreparedChat] = []

    async def stream(chat: PreparedChat) -> AsyncGenerator[list[ChatDelta], None]:
        asked.append(chat)
        chat.usage.completion_tokens, chat.usage.cached_tokens, chat.usage.reasoning_tokens = 9, 2, 4
        for delta in deltas:
            if isinstance(delta, Exception):
                raise delta
            yield [delta]

    monkeypatch.setattr(app.state.context.chat, "stream", stream)
    return asked
