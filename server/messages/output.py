"""Converts a model's output to content blocks of Anthropic's messages and to their events."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]


class MessageWriter:
    """Builds a message's `content` from pieces, in order of arrival; each method returns the resulting events.

    At most one block is open at a time: a piece of another kind closes it.
    """

    def __init__(self, message: dict[str, Any], *, omit_thinking: bool = False):
        self.message = message
        """The message object so far; `content` grows as blocks are closed."""
        self._omit_thinking = omit_thinking
        self._block: dict[str, Any] | None = None
        self._pieces: list[str] = []

    def start(self) -> list[Event]:
        """The events before the first token."""
        return [{"type": "message_start", "message": {**self.message, "content": []}}, {"type": "ping"}]

    def reasoning(self, text: str) -> list[Event]:
        """Append reasoning; an omitted thinking block keeps its signature."""
        events = self._open({"type": "thinking", "thinking": "", "signature": ""})
        self._pieces.append(text)
        if not self._omit_thinking:
            events.append(self._delta({"type": "thinking_delta", "thinking": text}))
        return events

    def text(self, text: str) -> list[Event]:
        """Append text of the answer."""
        events = self._open({"type": "text", "text": ""})
        self._pieces.append(text)
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def call(self, call_id: str, name: str) -> list[Event]:
        """Begin a tool call."""
        events = self._close()
        return [*events, *self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})]

    def arguments(self, fragment: str) -> list[Event]:
        """Append a fragment of the open call's arguments, as JSON."""
        self._pieces.append(fragment)
        return [self._delta({"type": "input_json_delta", "partial_json": fragment})]

    def finish(
        self, *, stop_reason: str, stop_sequence: str | None, usage: dict[str, Any], extra: Mapping[str, Any] | None = None
    ) -> list[Event]:
        """End the message; `extra`: fields that are not Anthropic's."""
        events, extra = self._close(), extra or {}
        end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        self.message.update(**end, usage=usage, **extra)
        return [*events, {"type": "message_delta", "delta": end, "usage": usage, **extra}, {"type": "message_stop"}]

    def _open(self, block: dict[str, Any]) -> list[Event]:
        if self._block is not None and self._block["type"] == block["type"]:
            return []
        events = self._close()
        self._block = block
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        block, whole = self._block, "".join(self._pieces)
        if block is None:
            return []
        events = []
        if block["type"] == "text":
            block["text"] = whole
        elif block["type"] == "tool_use":
            block["input"] = parsed_arguments(whole)
        else:
            block["thinking"] = "" if self._omit_thinking else whole
            # Clients reject a thinking block without a signature and send it back; nothing here depends on it.
            block["signature"] = hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        events.append({"type": "content_block_stop", "index": self._index})
        self.message["content"].append(block)
        self._block, self._pieces = None, []
        return events

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"])


def parsed_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty if the model wrote no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def usage_object(num_prompt: int, num_cached: int, num_output: int) -> dict[str, Any]:
    """Token counts of a message; Anthropic counts cached tokens separately."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def stop_reason_of(finish_reason: str, stop_reason: int | str | None, *, filled_context: bool) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) of an answer in Anthropic's terms."""
    if finish_reason == "tool_calls":
        return "tool_use", None
    if finish_reason == "length":
        return ("model_context_window_exceeded" if filled_context else "max_tokens"), None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None
