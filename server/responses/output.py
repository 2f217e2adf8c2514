"""Converts a model's output to output items of a response and to their numbered events."""

import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from server.responses.custom_tools import InputReader, input_of

Event = dict[str, Any]
Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An unguessable id, such as `msg_…`."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseWriter:
    """Builds a response's `output` from pieces of a message, in order of arrival.

    Each method returns the resulting events; a caller that does not stream discards them. At most one item is open at a
    time: a piece of another kind closes it.
    """

    def __init__(self, response: dict[str, Any], custom_tool_names: Collection[str] = ()):
        self._custom_tool_names = frozenset(custom_tool_names)
        self.response = response
        """The response object so far; `output` grows as items are closed."""
        self._sequence_number = 0
        self._item: Item | None = None
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._call_index: int | None = None
        self._input: InputReader | None = None
        """State of an open call of a custom tool."""

    def start(self) -> list[Event]:
        """The events before the first token."""
        return [
            self._event("response.created", response=self._snapshot()),
            self._event("response.in_progress", response=self._snapshot()),
        ]

    def reasoning(self, text: str) -> list[Event]:
        """Append reasoning."""
        events = self._open(
            "reasoning", {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": [], "status": "in_progress"}
        )
        self._pieces.append(text)
        return [*events, self._on_part("response.reasoning_text.delta", delta=text)]

    def text(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """Append text of the answer, with the logprobs of its tokens if requested."""
        events = self._open(
            "message", {"type": "message", "id": new_id("msg"), "role": "assistant", "content": [], "status": "in_progress"}
        )
        self._pieces.append(text)
        self._logprobs.extend(logprobs or [])
        return [*events, self._on_part("response.output_text.delta", delta=text, logprobs=logprobs or [])]

    def call(self, index: int, call_id: str, name: str) -> list[Event]:
        """Begin a function call; `index` counts the calls of the message."""
        events = self._close("completed")
        self._call_index = index
        is_custom = name in self._custom_tool_names
        self._input = InputReader() if is_custom else None
        self._item = {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": new_id("ctc" if is_custom else "fc"),
            "call_id": call_id,
            "name": name,
            "input" if is_custom else "arguments": "",
            "status": "in_progress",
        }
        return [*events, self._item_event("response.output_item.added", dict(self._item))]

    def arguments(self, index: int, fragment: str) -> list[Event]:
        """Append a fragment of the open call's arguments."""
        assert index == self._call_index, "the dialects' state machine ends one call before it begins the next"
        self._pieces.append(fragment)
        if self._input is None:
            return [self._item_event("response.function_call_arguments.delta", None, delta=fragment)]
        return self._input_delta(self._input.feed(fragment))

    def _input_delta(self, text: str) -> list[Event]:
        """Append text to the input of the open call of a custom tool."""
        if not text:
            return []
        assert self._item is not None
        self._item["input"] += text
        return [self._item_event("response.custom_tool_call_input.delta", None, delta=text)]

    def finish(
        self,
        *,
        usage: dict[str, Any] | None,
        incomplete_reason: str | None = None,
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> list[Event]:
        """End: complete, or cut for a reason (`max_output_tokens`); `logprobs` are those of the last tokens without text."""
        status = "completed" if incomplete_reason is None else "incomplete"
        self._logprobs.extend(logprobs)
        events = self._close(status)
        self.response.update(status=status, usage=usage)
        if incomplete_reason is None:
            self.response["completed_at"] = int(time.time())
        else:
            self.response["incomplete_details"] = {"reason": incomplete_reason}
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def fail(self, message: str, code: str = "server_error") -> list[Event]:
        """End with a server error; the output so far stays, marked as incomplete."""
        events = self._close("incomplete")
        self.response.update(status="failed", error={"code": code, "message": message})
        return [*events, self._event("response.failed", response=self._snapshot())]

    def cancel(self) -> None:
        """Stopped by the caller; no event is sent."""
        self._close("incomplete")
        self.response["status"] = "cancelled"

    def _open(self, kind: str, item: Item) -> list[Event]:
        if self._item is not None and self._item["type"] == kind:
            return []
        events = self._close("completed")
        self._item = item
        events.append(self._item_event("response.output_item.added", {**item, "content": []}))
        events.append(self._on_part("response.content_part.added", part=self._part("", [])))
        return events

    def _close(self, status: str) -> list[Event]:
        """Close the open item, if any."""
        item, self._item = self._item, None
        if item is None:
            return []
        whole, self._pieces = "".join(self._pieces), []
        logprobs, self._logprobs = self._logprobs, []
        self._item = item  # used by the events below
        if item["type"] == "function_call":
            item["arguments"] = whole
            events = [self._item_event("response.function_call_arguments.done", None, name=item["name"], arguments=whole)]
        elif item["type"] == "custom_tool_call":
            # A cut call keeps what has arrived of its input.
            given = input_of(whole) if status == "completed" else item["input"]
            events = self._input_delta(given[len(item["input"]) :] if given.startswith(item["input"]) else "")
            events.append(self._item_event("response.custom_tool_call_input.done", None, input=item["input"]))
        elif item["type"] == "reasoning":
            events = [self._on_part("response.reasoning_text.done", text=whole)]
        else:
            events = [self._on_part("response.output_text.done", text=whole, logprobs=logprobs)]
        if item["type"] not in ("function_call", "custom_tool_call"):
            item["content"] = [self._part(whole, logprobs)]
            events.append(self._on_part("response.content_part.done", part=item["content"][0]))
        item["status"] = status
        events.append(self._item_event("response.output_item.done", item))
        self._item = None
        self.response["output"].append(item)
        return events

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _on_part(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, None, content_index=0, **fields)

    def _item_event(self, kind: str, item: Item | None, **fields: Any) -> Event:
        """An event about the open item: contains the whole item if given, else its id."""
        assert self._item is not None
        about = {"item_id": self._item["id"]} if item is None else {"item": item}
        return self._event(kind, output_index=len(self.response["output"]), **about, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": list(self.response["output"])}


def usage_object(num_prompt: int, num_cached: int, num_created: int, num_output: int, num_reasoning: int) -> dict[str, Any]:
    """Token counts of a response in the Responses API's format."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_created},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_output,
    }
