"""Which content each slot of a tier has, and which of them make room for others: a segmented LRU."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

PROTECTED_SHARE = 0.8
"""Largest part of the slots for contents that were used."""
NO_SLOT = -1
"""In place of a slot that is not known."""
PROTECTED_SHARES = {"slru": PROTECTED_SHARE, "lru": 0.0}
"""By eviction policy."""


@dataclass(eq=False, slots=True)
class Content:
    """A block's content in a slot."""

    name: bytes
    slot: int
    is_ready: bool = False
    """Whether it is complete, and computed without error."""
    num_uses: int = 0
    """Copies that read or write the slot, which is not given away meanwhile."""
    is_listed: bool = True
    """Whether it can be found."""
    is_wrong: bool = False
    """Whether it turned out to be computed wrongly, or damaged."""
    is_being_read: bool = False
    """Whether a store copies it to its slot."""
    read_from: str | None = None
    """The store that it was read from, until it is loaded for the first time."""
    was_offered: bool = False
    """Whether a store behind host memory took it, or has it already."""
    give_back: Callable[[int], None] | None = None
    """Called with its slot when it is no longer used, if that is a store's own, which lends it to copies; see SlotStore."""

    @property
    def is_lent(self) -> bool:
        return self.give_back is not None


class Contents:
    """Contents by name. New ones are on probation, unless they were used before. One that is used becomes protected, and is on probation
    again when there are too many of these. Those on probation make room first, and of each kind the one that was stored or used longest
    ago.

    With a protected_share of 0 all are on probation, which is a plain LRU.

    Contents that stores lend are found too, for as long as they are used. They have none of the slots."""

    def __init__(
        self,
        num_slots: int,
        protected_share: float = PROTECTED_SHARE,
        on_change: Callable[[bytes, bool], None] = lambda name, is_there: None,
    ):
        """protected_share: largest part of the slots for protected ones. on_change: called with the name of each content that can be loaded
        from now on (True), or no longer."""
        self.num_slots, self._on_change = num_slots, on_change
        self._free = list(range(num_slots - 1, -1, -1))
        self._found: dict[bytes, Content] = {}
        """All contents, each in one of the next three."""
        self._probation: OrderedDict[bytes, Content] = OrderedDict()
        self._protected: OrderedDict[bytes, Content] = OrderedDict()
        self._lent: dict[bytes, Content] = {}
        self._not_given_back: set[Content] = set()
        """Lent contents, including those that are not found any more."""
        self._max_protected = int(protected_share * num_slots)
        self.num_added = self.num_evicted = self.num_lost = 0
        """Contents that got a slot, contents that made room for others, and those of them that no store took."""

    def __len__(self) -> int:
        """Contents that have slots."""
        return len(self._found) - len(self._lent)

    def __contains__(self, name: bytes) -> bool:
        return name in self._found

    def missing(self, names: Sequence[bytes]) -> list[bytes]:
        """The contents among these that cannot be found. One call for many, as a prompt has thousands."""
        found = self._found
        return [name for name in names if name not in found]

    def get(self, name: bytes) -> Content | None:
        """The content of a name, ready or not."""
        return self._found.get(name)

    def found(self, names: Iterable[bytes]) -> list[Content]:
        """The contents of these names that there are, ready or not."""
        found = self._found
        return [content for name in names if (content := found.get(name)) is not None]

    def ready_names(self) -> set[bytes]:
        """The contents of slots that can be loaded."""
        return {content.name for content in self._all() if content.is_ready and not content.is_lent}

    def is_kept(self, name: bytes) -> bool:
        """Whether a slot has a content that can be loaded."""
        content = self.get(name)
        return content is not None and content.is_ready and not content.is_lent

    def is_ready(self, name: bytes) -> bool:
        """Whether a content can be loaded at once."""
        content = self.get(name)
        return content is not None and content.is_ready

    def loadable(self, names: Sequence[bytes]) -> list[bytes]:
        """The contents among these that are ready, or will be once a store has read them."""
        found = self._found
        return [name for name in names if (each := found.get(name)) is not None and (each.is_ready or each.is_being_read)]

    def make_ready(self, content: Content) -> None:
        """A content is complete, and right."""
        content.is_ready = True
        if content.is_listed and content.give_back is None:
            self._on_change(content.name, True)

    def add(self, name: bytes, *, was_used: bool = False) -> Content | None:
        """Give a new content a slot, with one use. None if copies use all slots. was_used: it is protected at once."""
        assert name not in self._found, "a content has a slot already"
        if not self._free and not self._evict():
            return None
        self.num_added += 1
        content = self._found[name] = self._probation[name] = Content(name, self._free.pop(), num_uses=1)
        if was_used:
            self.protect((content,))
        return content

    def borrow(self, name: bytes, give_back: Callable[[int], None]) -> Content:
        """Find a content that a store lends, with one use. Its slot is not known yet."""
        assert name not in self, "a content has a slot already"
        content = Content(name, NO_SLOT, num_uses=1, give_back=give_back)
        self._found[name] = self._lent[name] = content
        self._not_given_back.add(content)
        return content

    def _evict(self) -> bool:
        unused = next(self._unused(), None)
        if unused is None:
            return False
        self.remove(unused)
        self.num_evicted += 1
        self.num_lost += not unused.was_offered
        return True

    def _unused(self) -> Iterator[Content]:
        """Contents that can make room, in order."""
        for segment in (self._probation, self._protected):
            yield from (content for content in segment.values() if not content.num_uses)

    def cold(self, count: int) -> list[Content]:
        """The contents that make room for others before there have been so many."""
        return list(itertools.islice(self._unused(), max(0, count - len(self._free))))

    def use(self, contents: Collection[Content]) -> None:
        """A copy will read each of these contents, for a request."""
        for content in contents:
            assert content.is_listed and (content.is_ready or content.is_being_read)
            content.num_uses += 1
        self.protect(contents)

    def protect(self, contents: Iterable[Content]) -> None:
        """These contents are used, or will be, in this order: they are the last of the protected ones to make room."""
        probation, protected = self._probation, self._protected
        for content in contents:
            name = content.name
            if name in protected:
                protected.move_to_end(name)
            elif probation.pop(name, None) is None:
                assert content.is_lent
            else:
                protected[name] = content
                if len(protected) > self._max_protected:
                    name, oldest = protected.popitem(last=False)
                    probation[name] = oldest

    def hold(self, content: Content) -> None:
        """A copy will read a content, for no request."""
        assert content.is_listed and content.is_ready
        content.num_uses += 1

    def release(self, content: Content) -> None:
        """A copy no longer uses the slot."""
        self.release_all((content,))

    def release_all(self, contents: Iterable[Content]) -> None:
        """See `release`."""
        for content in contents:
            content.num_uses -= 1
            if not content.num_uses and (not content.is_listed or content.give_back is not None):
                self._free_unused(content)

    def remove(self, content: Content) -> None:
        """Find a content no more."""
        if content.is_listed:
            content.is_listed = False
            del self._found[content.name]
            for each in (self._probation, self._protected, self._lent):
                each.pop(content.name, None)
            self._free_unused(content)
            if content.is_ready and not content.is_lent:
                self._on_change(content.name, False)

    def clear(self) -> None:
        """Find none of the contents any more."""
        for content in self._all():
            self.remove(content)

    def end_uses(self, but: Mapping[Content, int]) -> None:
        """No copies use slots any longer, but so many of each of these contents. Others that are not ready are dropped."""
        for content in self._all():
            content.num_uses = but.get(content, 0)
            if not content.is_ready and content not in but:
                self.remove(content)
        for content in self._not_given_back - but.keys():
            content.num_uses = 0
            self._free_unused(content)
        for content, num_uses in but.items():
            content.num_uses = num_uses
        used = {content.slot for content in (*self._all(), *but)}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def _all(self) -> list[Content]:
        return [*self._probation.values(), *self._protected.values(), *self._lent.values()]

    def _free_unused(self, content: Content) -> None:
        if content.num_uses:
            return
        if content.give_back is None:
            if not content.is_listed:
                self._free.append(content.slot)
        elif content.is_listed:
            self.remove(content)
        elif content in self._not_given_back:
            self._not_given_back.remove(content)
            if content.slot != NO_SLOT:
                content.give_back(content.slot)

    def check_integrity(self, used: dict[Content, int]) -> None:
        """Raise AssertionError unless slots and uses are those of the listed contents, and of these that copies use."""
        found = {*self._all(), *used}
        slots = sorted([*self._free, *(content.slot for content in found if not content.is_lent)])
        assert slots == list(range(self.num_slots)), "a slot is free and used, or neither"
        assert all(content.num_uses == used.get(content, 0) for content in found), "uses differ from copies"
        assert all(content.is_listed and content.name == name for name, content in self._probation.items())
        assert all(content.is_listed and content.name == name for name, content in self._protected.items())
        assert self._found == {**self._probation, **self._protected, **self._lent}
        assert len(self._probation) + len(self._protected) == len(self)
        assert all(content.is_listed and content.num_uses for content in self._lent.values()), "a content is lent for no use"
        assert len(self._protected) <= max(1, self._max_protected)
