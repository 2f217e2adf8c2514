"""Moves contents between slots of host memory and the stores behind it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from jaxllm.kv_tiers.contents import Content, Contents
from jaxllm.kv_tiers.slot_store import SlotStore
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import SchedulerStats

COLD_SHARE = 1 / 4
"""Part of the slots whose contents make room next, and are written ahead."""
_OFFER_SHARE = 1 / 8
"""Stores are offered these whenever so large a part of them is new: to look at them takes time."""


class Stores:
    """The stores of a host tier, in the order in which they are asked, with the transfers under way. Each has one use of its contents."""

    def __init__(
        self,
        stores: Sequence[SlotStore],
        contents: Contents,
        numbers: Iterator[int],
        max_blocks: int,
        *,
        writes_at_once: bool = False,
    ):
        """numbers: of transfers. max_blocks: most contents of a transfer. writes_at_once: see HostTier."""
        self._stores, self._contents, self._numbers, self._max_blocks = stores, contents, numbers, max_blocks
        self._reads: dict[int, list[Content]] = {}
        self._writes: dict[int, tuple[SlotStore, list[Content]]] = {}
        self._num_cold = max(1, int(COLD_SHARE * contents.num_slots))
        self.writes_at_once = writes_at_once and any(store.writes for store in stores)
        self._ready: dict[Content, None] = {}
        """Contents that stores are to be offered at once."""
        self._num_added = 0
        """Contents that had been added when stores were last offered cold ones."""
        self._was_refused = self._has_room = False
        """Whether a store did not take all that it was offered then, and whether it has ended a write since, or has room again."""

    def set_listener(self, listener: TierListener | None) -> None:
        """Set that of all stores."""
        for store in self._stores:
            store.listener = listener

    def find(self, names: Sequence[bytes]) -> dict[bytes, SlotStore]:
        """The contents among these that stores have."""
        found: dict[bytes, SlotStore] = {}
        for store in self._stores:
            missing = [name for name in names if name not in found]
            found.update(dict.fromkeys(store.find(missing), store) if missing else {})
        return found

    def awaited(self, names: Sequence[bytes]) -> set[bytes]:
        """The contents among these that stores may have later."""
        awaited = {name for store in self._stores for name in store.awaited(names)}
        return awaited.difference(self.find(list(awaited))) if awaited else awaited

    def seconds(self, found: Mapping[bytes, SlotStore]) -> float:
        """Estimated time to read what was found."""
        return sum(store.seconds(count) for store, count in Counter(found.values()).items())

    def read(self, names: Sequence[bytes], *, ahead: bool = False) -> None:
        """Begin to read contents that stores have, as far as there are slots for them. ahead: there is no load of them yet, for which
        stores would lend them."""
        by_store: dict[SlotStore, list[bytes]] = {}
        stores = self.find(names)
        for name in names:  # in order: there may be too few slots
            if name in stores:
                by_store.setdefault(stores[name], []).append(name)
        for store, found in by_store.items():
            lent = set(store.lends(found))
            if lent and not ahead:
                self._begin_read(store, [self._contents.borrow(name, store.give_back) for name in found if name in lent])
            added = (self._contents.add(name) for name in found if name not in lent)
            self._begin_read(store, [content for content in added if content is not None])

    def _begin_read(self, store: SlotStore, contents: list[Content]) -> None:
        for part in _cut(contents, self._max_blocks):
            number = next(self._numbers)
            self._reads[number] = part
            for content in part:
                content.is_being_read, content.read_from = True, store.name
            slots = [content.slot for content in part if not content.is_lent]
            store.read(number, [content.name for content in part], slots)

    def take_in(self) -> None:
        """Process the transfers that are over."""
        for store in self._stores:
            for transfer in store.finished():
                if (read := self._reads.pop(transfer.number, None)) is not None:
                    for content, slot in zip(read, transfer.slots, strict=False):
                        content.slot = slot
                    self._end_read(read, transfer.is_right)
                    continue
                self._has_room = True
                if transfer.is_right:
                    _, written = self._writes.pop(transfer.number)
                    store.discard([content.name for content in written if content.is_wrong])
                    for content, right in zip(written, transfer.is_right, strict=True):
                        content.was_offered &= right
                        self._contents.release(content)

    def _end_read(self, contents: Iterable[Content], is_right: Sequence[bool]) -> None:
        for content, right in zip(contents, is_right, strict=True):
            content.is_being_read = False
            if right:
                self._contents.make_ready(content)
            else:
                content.is_wrong = True
                self._contents.remove(content)
            self._contents.release(content)

    def note_ready(self, content: Content) -> None:
        """The content of a block is complete, and right."""
        if self.writes_at_once and content.is_listed:
            self._ready[content] = None

    def stop_at_once(self) -> None:
        """Leave what is ready for when it makes room, but for what stores take now: there may be no further steps."""
        if self._ready:
            self.write_ahead()
            self._ready.clear()

    @property
    def is_behind(self) -> bool:
        """Whether stores write contents, or take some soon that are to be written at once."""
        return bool(self._writes) or (bool(self._ready) and (not self._was_refused or self._has_room or self._is_preparing()))

    def _is_preparing(self) -> bool:
        """Whether a store takes nothing now, and will soon."""
        return any(store.writes and store.is_opening() for store in self._stores)

    def write_ahead(self) -> None:
        """Offer stores the contents that make room next, so that they need not wait for it, and those that are to be written at once."""
        writers = [store for store in self._stores if store.writes]
        num_new = self._contents.num_added - self._num_added
        is_due = num_new >= (1 if self._ready else max(1, _OFFER_SHARE * self._num_cold))
        is_due |= (self._was_refused and self._has_room) or (bool(self._ready) and not self._was_refused)
        if not writers or not is_due or self._is_preparing():
            return  # a store that opens is offered all of it as soon as it is open
        self._num_added, self._was_refused, self._has_room = self._contents.num_added, False, False
        num_writing = sum(len(contents) for _, contents in self._writes.values())
        for part in _cut(self._candidates(self._num_cold - num_writing), self._max_blocks):
            for store in writers:
                there = set(store.find([content.name for content in part]))
                for content in part:
                    content.was_offered |= content.name in there
                if not (new := [content for content in part if content.name not in there]):
                    continue
                number = next(self._numbers)
                if not store.write(number, [content.name for content in new], [content.slot for content in new]):
                    self._was_refused = True
                    continue
                self._writes[number] = store, new
                for content in new:
                    content.was_offered = True
                    self._contents.hold(content)
        self._ready = {content: None for content in self._ready if content.is_listed and not content.was_offered}

    def _candidates(self, count: int) -> list[Content]:
        """Contents to write, so many of each kind at most."""
        at_once = (content for content in self._ready if content.is_listed)
        chosen = dict.fromkeys([*islice(at_once, max(0, count)), *self._contents.cold(count)])
        return [content for content in chosen if not content.was_offered]

    def uses(self) -> Counter[Content]:
        """How many transfers use each content."""
        written = (contents for _, contents in self._writes.values())
        return Counter(content for contents in (*self._reads.values(), *written) for content in contents)

    def discard(self, names: Sequence[bytes]) -> None:
        """Drop contents that are wrong."""
        for store in self._stores:
            store.discard(names)

    def reset(self, *, external: bool) -> None:
        """See SlotStore. Transfers under way end as they would."""
        self._ready.clear()
        for store in self._stores:
            store.reset(external=external)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the numbers of all stores."""
        if any(store.writes for store in self._stores):
            stats.num_lost_blocks += self._contents.num_lost
        for store in self._stores:
            store.add_stats(stats)

    def close(self) -> None:
        """See SlotStore."""
        for store in self._stores:
            store.close()


def _cut(contents: list[Content], size: int) -> list[list[Content]]:
    return [contents[start : start + size] for start in range(0, len(contents), size)]
