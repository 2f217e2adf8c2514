"""Server-sent events with a name, as the Responses and the Messages API write them."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Events one after the other."""
    return b"".join(map(named_event, events))
