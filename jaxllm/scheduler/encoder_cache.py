"""Keeps track of encoded items of prompts on the device: which pages of the slab hold which item, and which requests compute its tokens.

An item is encoded whole before the first step that computes a token of it. While requests decode, a large one is encoded in parts, one a
step; once begun it is encoded to its end, whether or not its request still waits. Equal items share their pages, also those of different
requests. What no request computes stays until others need its pages, longest unused first. Steps reach the device in the order in
which they were planned, so pages that are freed here can be written by the next plan even while steps that read them are in flight.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from jaxllm.device_ops import AnyDeviceOp, EncodeItem, EncodeParts, UseItem
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.errors import InvalidRequestError
from jaxllm.request import PromptItem, Request
from jaxllm.scheduler.admission import ChunkRoom
from jaxllm.scheduler_stats import SchedulerStats


@dataclass(eq=False)
class _Entry:
    """An item in the slab."""

    pages: list[int]
    num_patches: int
    cost: int
    """Share of its budget that a step spends to encode it, or a part of it."""
    parts_left: int
    """Parts that no complete plan encodes."""
    begun_for: str = ""
    """The id of the request that had it begun, if in parts."""
    was_used: bool = False
    """Whether a complete plan computes tokens of it."""
    users: dict[Request, bool] = field(default_factory=dict)
    """Requests that compute tokens of it, and whether a complete plan does."""


class EncoderCache(ChunkRoom):
    """Pages and budgets for the kinds of items that an encoder computes.

    Of the requests of a step, the first that finds no budget or no pages ends encoding for this step, so that none waits for ever while
    others that need less go ahead.
    """

    def __init__(self, sizes: EncoderSizes, *, whole_tokens: int = 0, kinds: tuple[str, ...] = ("image",)):
        """whole_tokens: most tokens of an item, where a step that computes one of them must compute all that are left, e.g. because they
        attend to each other; 0: steps may cut items."""
        self.item_kinds = kinds
        self.min_chunk = max(1, whole_tokens)
        self._sizes, self._whole_tokens = sizes, whole_tokens
        self._free = list(range(sizes.num_pages))
        self._in_use: dict[bytes, _Entry] = {}
        """By content hash, as the next one."""
        self._unused: dict[bytes, _Entry] = {}
        """Encoded items without users, longest unused first."""
        self._begun: dict[bytes, _Entry] = {}
        """The item that is encoded in parts, if any. It has no users until the step behind its last part."""
        self._step_ops: list[AnyDeviceOp] = []
        """This step's parts of that item."""
        self._in_parts = False
        """Whether this step encodes one part of a large item, and spends costs: `EncoderSizes.cost`. If not, it spends patches."""
        self._spent = 0
        """Costs, or patches, that this step encodes."""
        self._is_closed = False
        """Whether this step encodes nothing more."""
        self._num_queries = self._num_hits = self._num_evictions = self._num_encoded_patches = 0

    # Admission

    def check(self, item: PromptItem) -> None:
        num_patches, most = self._num_patches_of(item), self._sizes.max_item_patches
        if num_patches > most:
            raise InvalidRequestError(
                f"the {item.kind} at position {item.position} has {num_patches} patches, this engine encodes at most {most}; make it "
                "smaller, or raise --mm-max-patches",
                "prompt",
            )
        if 0 < self._whole_tokens < item.num_tokens:
            raise InvalidRequestError(
                f"the {item.kind} at position {item.position} has {item.num_tokens} tokens, a step of this engine computes at most "
                f"{self._whole_tokens} of one; make it smaller",
                "prompt",
            )

    def release(self, request: Request) -> None:
        if request.spec.items:
            for name, entry in [*self._in_use.items()]:
                if entry.users.pop(request, None) is not None:
                    self._settle(name, entry)

    # Steps

    def begin_step(self, *, decodes: bool) -> None:
        for name, entry in [*self._in_use.items()]:
            entry.users = {user: True for user, is_planned in entry.users.items() if is_planned and _is_inside(user, name)}
            self._settle(name, entry)
        self._in_parts = decodes and self._sizes.max_decode_patches > 0
        self._spent, self._is_closed = 0, False
        for name, entry in [*self._begun.items()]:
            count = min(1, entry.parts_left) if self._in_parts else entry.parts_left
            if count:
                self._spent += entry.cost if self._in_parts else 0
                self._step_ops.append(EncodeParts(0, count, entry.begun_for))
                self._note_parts(entry, count)
            # Decodes would wait for the last part and for the first tokens too, if they were in the same step.
            if not count or not self._in_parts:
                self._unused[name] = self._begun.pop(name)

    def limit(self, request: Request, start: int, count: int) -> int:
        end = start + count
        for item in self._items(request, start, end):
            if (self._whole_tokens and item.end > end) or not self._grant(request, item):
                return max(0, item.position - start)
        return count

    def _grant(self, request: Request, item: PromptItem) -> bool:
        """Let a request use an item, which this step encodes if none did before. Returns whether it may."""
        name = item.content_hash
        if name in self._begun:
            return False
        entry = self._in_use.get(name) or self._unused.pop(name, None) or self._new_entry(item)
        if entry is None:
            self._is_closed = True
            return False
        if self._in_parts and entry.parts_left > 1:
            self._begun[name], entry.begun_for = entry, request.request_id
            self._step_ops.append(EncodeItem(0, item.payload, entry.pages, 1, entry.begun_for))
            self._note_parts(entry, 1)
            return False
        self._in_use[name] = entry
        entry.users.setdefault(request, False)
        return True

    def _new_entry(self, item: PromptItem) -> _Entry | None:
        """Take budget and pages for an item; None if there are too few."""
        num_patches, sizes = self._num_patches_of(item), self._sizes
        cost, most = num_patches, sizes.max_step_patches
        if self._in_parts:
            cost, most = sizes.part_cost(num_patches), sizes.max_decode_patches
        if self._is_closed or (self._spent and self._spent + cost > most):
            return None
        pages = self._take_pages(self._num_pages_of(item))
        if pages is None:
            return None
        self._spent += cost
        return _Entry(pages, num_patches, cost, sizes.num_parts(num_patches))

    def _note_parts(self, entry: _Entry, count: int) -> None:
        """A complete plan encodes so many more parts of an item."""
        entry.parts_left -= count
        if not entry.parts_left:
            self._num_encoded_patches += entry.num_patches

    def _take_pages(self, count: int) -> list[int] | None:
        """Take free pages, and those of unused items if need be; None, and nothing is taken, if all are too few."""
        if len(self._free) + sum(len(entry.pages) for entry in self._unused.values()) < count:
            return None
        while len(self._free) < count:
            self._free += self._unused.pop(next(iter(self._unused))).pages
            self._num_evictions += 1
        return [self._free.pop() for _ in range(count)]

    def ops(self, request: Request, start: int, count: int) -> list[AnyDeviceOp]:
        ops: list[AnyDeviceOp] = []
        for item in self._items(request, start, start + count):
            entry = self._in_use[item.content_hash]
            if not entry.users[request]:
                entry.users[request] = True
                self._num_queries += 1
                self._num_hits += entry.was_used
                entry.was_used = True
            if entry.parts_left:
                ops.append(EncodeItem(0, item.payload, entry.pages, entry.parts_left))
                self._note_parts(entry, entry.parts_left)
            ops.append(UseItem(0, request.request_id, item.position, entry.pages))
        return ops

    def step_ops(self) -> list[AnyDeviceOp]:
        ops, self._step_ops = self._step_ops, []
        return ops

    def is_begun(self, request: Request) -> bool:
        return any(item.content_hash in self._begun for item in request.spec.items)

    def _settle(self, name: bytes, entry: _Entry) -> None:
        """Keep an entry that lost its last user for reuse if it is encoded; otherwise free its pages and budget."""
        if entry.users:
            return
        del self._in_use[name]
        if entry.parts_left:
            self._free += entry.pages
            self._spent -= entry.cost
        else:
            self._unused[name] = entry

    def forget(self) -> None:
        entries = self._entries()
        assert all(request.status is request.waiting_status for entry in entries for request in entry.users), (
            "a request computes"
        )
        self._free += [page for entry in entries for page in entry.pages]
        for known in (self._in_use, self._unused, self._begun):
            known.clear()
        self._step_ops.clear()

    def _entries(self) -> list[_Entry]:
        return [*self._in_use.values(), *self._unused.values(), *self._begun.values()]

    # Sizes of items

    def _items(self, request: Request, start: int, end: int) -> Iterator[PromptItem]:
        """The items that have tokens from `start` to `end`, in order."""
        for item in request.spec.items:
            if item.position < end and item.end > start and item.kind in self.item_kinds:
                yield item

    def _num_patches_of(self, item: PromptItem) -> int:
        return self._sizes.num_patches(item.num_embeddings)

    def _num_pages_of(self, item: PromptItem) -> int:
        return -(-item.num_embeddings // self._sizes.page_embeddings)

    # Statistics and checks

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.num_item_pages += self._sizes.num_pages
        stats.num_used_item_pages += sum(len(entry.pages) for entry in self._in_use.values())
        stats.item_cache_queries += self._num_queries
        stats.item_cache_hits += self._num_hits
        stats.num_item_evictions += self._num_evictions
        stats.num_encoded_patches += self._num_encoded_patches

    def check_integrity(self, requests: Collection[Request]) -> None:
        entries = self._entries()
        pages = [*self._free, *(page for entry in entries for page in entry.pages)]
        assert sorted(pages) == list(range(self._sizes.num_pages)), "a page is lost, or belongs to two items"
        assert len({*self._in_use, *self._unused, *self._begun}) == len(entries), "an item is in two states"
        assert len(self._begun) <= 1 and not self._step_ops, "two items are encoded in parts, or a part was not planned"
        for entry in self._begun.values():
            assert not entry.users and entry.parts_left < self._sizes.num_parts(entry.num_patches), "no part is done"
        for name, entry in self._in_use.items():
            assert entry.users, "no request uses an item in use"
            assert entry.users.keys() <= {*requests}, "a request that ended uses an item"
            for request, is_planned in entry.users.items():
                sizes = {self._num_pages_of(item) for item in request.spec.items if item.content_hash == name}
                assert sizes == {len(entry.pages)}, "a request uses an item that it does not have, or that has other pages"
                assert not is_planned or not entry.parts_left, "a step uses an item that is not encoded"
                assert not is_planned or request.num_computed_tokens, "a request that computes nothing uses an item"
        assert all(not entry.parts_left and not entry.users for entry in self._unused.values())
        most = self._sizes.max_encoded_patches
        if self._in_parts:
            most = max(self._sizes.max_decode_patches, *map(self._sizes.part_cost, self._sizes.programs))
        assert 0 <= self._spent <= most


def _is_inside(request: Request, name: bytes) -> bool:
    """Whether a request has computed some tokens of an item, and not all."""
    done = request.num_computed_tokens
    return any(item.position < done < item.end and item.content_hash == name for item in request.spec.items)
