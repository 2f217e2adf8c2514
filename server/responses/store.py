"""Stores responses for `previous_response_id`, retrieval and cancelling; bounded in number and bytes, evicts by LRU."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StoredResponse:
    """A response with its input."""

    owner: str
    """The owner: a digest of the API key, not the key."""
    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    """The request's own items; earlier ones are in `previous_response_id`."""
    events: list[bytes] = field(default_factory=list)
    """All events, if it was streamed in the background."""
    num_bytes: int = 0
    """JSON size of the whole entry; set by the store."""


class ResponseStore:
    """Stored responses by id. An owner cannot see or detect another's."""

    def __init__(self, max_responses: int, max_bytes: int):
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse, num_bytes: int) -> bool:
        """Add or replace a response, evicting older ones. False: it alone is larger than the store."""
        self._forget(entry.response["id"])
        if num_bytes > self.max_bytes or self.max_responses < 1:
            return False
        entry.num_bytes = num_bytes
        self._entries[entry.response["id"]] = entry
        self.num_bytes += num_bytes
        while len(self._entries) > self.max_responses or self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))
        return True

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """Get a response of this owner, and mark it as most recently used."""
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            return None
        self._entries.move_to_end(response_id)
        return entry

    def delete(self, response_id: str, owner: str) -> bool:
        """Whether this owner had such a response."""
        if self.get(response_id, owner) is None:
            return False
        self._forget(response_id)
        return True

    def conversation(self, response_id: str, owner: str) -> tuple[list[dict[str, Any]], int] | None:
        """The items of all turns up to a response, oldest first, and their bytes; None if one of them is no longer stored."""
        turns: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            entry = self._entries.get(wanted)
            if entry is None or entry.owner != owner:
                return None
            turns.append(entry)
            wanted = entry.response["previous_response_id"]
        for entry in turns:  # responses that others build on are evicted last
            self._entries.move_to_end(entry.response["id"])
        items = [item for entry in reversed(turns) for item in (*entry.input_items, *entry.response["output"])]
        return items, sum(entry.num_bytes for entry in turns)

    def check_integrity(self) -> None:
        """Check the invariants that hold between any two calls."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert self.num_bytes <= self.max_bytes and len(self._entries) <= max(0, self.max_responses)

    def _forget(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
