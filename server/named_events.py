"""JSON as the Responses and the Messages API send it: whole, or as server-sent events with a name."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


def encoded(value: Any) -> bytes:
    """A value as JSON. What clients sent is in some replies again, so integers may be of any size."""
    try:
        return msgspec.json.encode(value)
    except OverflowError:
        return json.dumps(value, separators=(",", ":")).encode()


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event))


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Events one after the other."""
    return b"".join(map(named_event, events))
