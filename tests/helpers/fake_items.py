"""Items of prompts without a model: an encoder with a budget for each step and few slots, and the device that encodes them.

The embedding of an item's token is a number that depends on the item's content and the token's place in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.device_ops import DeviceOp
from jaxllm.errors import InvalidRequestError
from jaxllm.model_config import ModelConfig
from jaxllm.request import PromptItem, Request
from jaxllm.scheduler.admission import Fit

PLACEHOLDER = 0
"""The token that stands where an item does."""


class Encode(DeviceOp, frozen=True):
    """Write the embeddings of an item to a slot."""

    payload: bytes
    num_tokens: int
    slot: int


class Place(DeviceOp, frozen=True):
    """A request's item at a position has its embeddings in a slot."""

    request_id: str
    position: int
    slot: int


class ItemToken(NamedTuple):
    request_id: str
    position: int
    """The position of the item."""
    offset: int


def embeddings(payload: bytes, count: int) -> list[int]:
    return [1000 + 97 * offset + sum(payload) * 7919 % 1009 for offset in range(count)]


def effective_prompt(prompt: Sequence[int], items: Sequence[PromptItem]) -> list[int]:
    """The prompt with embeddings in place of placeholder tokens."""
    found = list(prompt)
    for item in items:
        found[item.position : item.end] = embeddings(item.payload, item.num_tokens)
    return found


@dataclass
class FakeDevice:
    """Runs the ops of plans."""

    requests: dict[str, Request] = field(default_factory=dict)
    """Requests with items, by which it knows what is right."""
    slots: dict[int, list[int]] = field(default_factory=dict)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    num_encoded: int = 0

    def run(self, op: DeviceOp, memory: list[Any]) -> None:
        match op:
            case Encode():
                self.slots[op.slot] = embeddings(op.payload, op.num_tokens)
                self.num_encoded += 1
            case Place():
                self.places[op.request_id, op.position] = op.slot
            case _:
                op.copy(memory)  # type: ignore[attr-defined]

    def items_of(self, request_id: str, token_ids: list[int]) -> dict[int, ItemToken]:
        """Where items stand in a request's prompt. Puts their embeddings into `token_ids`."""
        request = self.requests.get(request_id)
        if request is None:
            return {}
        items = request.spec.items
        token_ids[: request.num_prompt_tokens] = effective_prompt(request.spec.prompt_token_ids, items)
        return {
            position: ItemToken(request_id, item.position, position - item.position)
            for item in items
            for position in range(item.position, item.end)
        }

    def check_embedding(self, token: ItemToken, right: int) -> None:
        """The device has the embedding of a token that is computed now."""
        slot = self.places[token.request_id, token.position]
        assert self.slots[slot][token.offset] == right, f"slot {slot} has another item"

    def start_over(self) -> None:
        self.slots.clear()
        self.places.clear()


class Encoder:
    """A ChunkRoom. An item is encoded whole, when its first token is about to be computed, and keeps its slot until its last was.

    Equal items share a slot.
    """

    item_kinds = ("image",)

    def __init__(self, max_step_tokens: int, num_slots: int):
        self.max_step_tokens, self.num_slots = max_step_tokens, num_slots
        self.slot_of: dict[bytes, int] = {}
        """Slots of encoded items and those that the step will encode, least recently used first."""
        self.users: dict[bytes, dict[str, Request]] = {}
        self.planned: dict[bytes, PromptItem] = {}
        """Items that this step is to encode."""
        self.num_left = 0

    def fits(self, request: Request) -> Fit:
        return Fit.NOW

    def take(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        for name, users in self.users.items():
            if users.get(request.request_id) is request:
                del users[request.request_id]
                self._give_back(name)

    def check(self, item: PromptItem) -> None:
        if item.num_tokens > self.max_step_tokens:
            raise InvalidRequestError(f"an item has {item.num_tokens} tokens, a step encodes {self.max_step_tokens}", "prompt")

    def begin_step(self) -> None:
        self.num_left = self.max_step_tokens
        for name in list(self.planned):
            self.users[name].clear()
            self._give_back(name)
        assert not self.planned
        for name, users in self.users.items():
            for request in list(users.values()):
                same = (item for item in request.spec.items if item.content_hash == name)
                if not any(item.position < request.num_computed_tokens < item.end for item in same):
                    del users[request.request_id]

    def _give_back(self, name: bytes) -> None:
        if not self.users[name] and name in self.planned:
            self.num_left += self.planned.pop(name).num_tokens
            del self.slot_of[name]

    def limit(self, request: Request, start: int, count: int) -> int:
        for item in overlapped(request, start, count):
            name = item.content_hash
            if name not in self.slot_of:
                if item.num_tokens > self.num_left or not self._has_slot():
                    return max(0, item.position - start)
                taken = set(self.slot_of.values())
                self.slot_of[name] = next(slot for slot in range(self.num_slots) if slot not in taken)
                self.planned[name] = item
                self.num_left -= item.num_tokens
            self.users.setdefault(name, {})[request.request_id] = request
        return count

    def _has_slot(self) -> bool:
        unused = [name for name in self.slot_of if not self.users.get(name)]
        if len(self.slot_of) == self.num_slots and unused:
            del self.slot_of[unused[0]]
        return len(self.slot_of) < self.num_slots

    def ops(self, request: Request, start: int, count: int) -> list[DeviceOp]:
        ops: list[DeviceOp] = []
        for item in overlapped(request, start, count):
            slot = self.slot_of[item.content_hash]
            if self.planned.pop(item.content_hash, None) is not None:
                ops.append(Encode(item.payload, item.num_tokens, slot))
            ops.append(Place(request.request_id, item.position, slot))
        return ops

    def forget(self) -> None:
        held = [request for users in self.users.values() for request in users.values()]
        assert all(request.status is request.waiting_status for request in held), "a request was not released"
        self.users.clear()
        self.slot_of.clear()
        self.planned.clear()


def overlapped(request: Request, start: int, count: int) -> list[PromptItem]:
    return [item for item in request.spec.items if item.position < start + count and item.end > start]


class Items:
    """Makes an Encoder for each scheduler of an engine."""

    described: Mapping[str, Any] = {"slots": 2}

    def new_room(self) -> Encoder:
        return Encoder(max_step_tokens=8, num_slots=2)


def make_items(config: EngineConfig, model_config: ModelConfig) -> Items | None:
    """For engines that cache prefixes."""
    return Items() if config.cache.enable_prefix_caching else None
