"""JSON for the Responses and the Messages API: whole, or as named server-sent events."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


def encoded(value: Any) -> bytes:
    """Encode a value as JSON. Replies repeat client input, so integers may have any size."""
    try:
        return msgspec.json.encode(value)
    except OverflowError:
        return json.dumps(value, separators=(",", ":")).encode()


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event))


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Concatenated events."""
    return b"".join(map(named_event, events))
