"""A store behind a host tier that is a dictionary. Its transfers take a random time, and it may lose or damage contents."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.kv_tiers.slot_store import Transfer
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import SchedulerStats

_STALE = b"before the reset "


@dataclass
class _Transfer:
    number: int
    names: Sequence[bytes]
    slots: Sequence[int]
    is_read: bool


class FakeStore:
    """Transfers read and write slots when they are over, so a slot that is given away too soon has something else."""

    name = "fake"

    def __init__(
        self,
        rng: random.Random,
        slots: list[Any],
        *,
        writes: bool = True,
        capacity: int = 1000,
        share_lost: float = 0.0,
        share_damaged: float = 0.0,
        max_transfers: int = 3,
        lends: bool = False,
        awaits: bool = False,
    ):
        """slots: of FakeCopies. share_lost: of contents that are found, but cannot be read. share_damaged: of those that are read wrong,
        which half the time only the devices notice. max_transfers: more writes are refused. awaits: contents can be read long after they
        were written, if ever, like those that another engine computes."""
        self.rng, self.slots, self.writes, self.capacity, self.max_transfers = rng, slots, writes, capacity, max_transfers
        self.share_lost, self.share_damaged = share_lost, share_damaged
        self.is_lender, self.awaits = lends, awaits
        self.coming: dict[bytes, Any] = {}
        """Contents that cannot be read yet."""
        self.num_awaited = 0
        """How often a load waited for one."""
        self.lent: set[int] = set()
        """Lent slots, which follow the others, that were not given back."""
        self.contents: dict[bytes, Any] = {}
        self.listener: TierListener | None = None
        self.tells = False
        """Whether it reports its contents to its listener."""
        self._told: set[bytes] = set()
        self.transfers: list[_Transfer] = []
        self.num_read = self.num_written = self.num_wakes = 0
        self.is_stuck = self.is_closed = False

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        return [name for name in names if name in self.contents]

    def awaited(self, names: Sequence[bytes]) -> list[bytes]:
        found = [name for name in names if name in self.coming and name not in self.contents]
        self.num_awaited += bool(found)
        return found

    def lends(self, names: Sequence[bytes]) -> list[bytes]:
        return [name for name in names if name in self.contents] if self.is_lender else []

    def give_back(self, slot: int) -> None:
        self.lent.remove(slot)
        self.slots[slot] = (["given back"], ["given back"])

    def seconds(self, num_blocks: int) -> float:
        return 0.001 * num_blocks

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        if self.is_lender:
            assert not slots, "a lender needs no slots"
            slots = range(len(self.slots), len(self.slots) + len(names))
            self.slots += [(["empty"], ["empty"])] * len(names)
        self._begin(number, names, slots, is_read=True)

    def is_opening(self) -> bool:
        return self.rng.random() < 0.1

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        if len(self.transfers) >= self.max_transfers:
            return False
        self._begin(number, names, slots, is_read=False)
        return True

    def _begin(self, number: int, names: Sequence[bytes], slots: Sequence[int], *, is_read: bool) -> None:
        used = {slot for transfer in self.transfers if transfer.is_read or is_read for slot in transfer.slots}
        assert 0 < len(names) == len(slots) == len(set(slots)) and used.isdisjoint(slots), "a slot has another use"
        self.transfers.append(_Transfer(number, list(names), list(slots), is_read))

    def finished(self) -> list[Transfer]:
        for name in list(self.coming):
            if (chance := self.rng.random()) < 0.15:
                content = self.coming.pop(name)
                if chance < 0.12:
                    self.contents[name] = content
        over = [] if self.is_stuck else [transfer for transfer in self.transfers if self.rng.random() < 0.4]
        self.transfers = [transfer for transfer in self.transfers if transfer not in over]
        found = []
        for transfer in over:
            is_right = self._end(transfer)
            lent = transfer.slots if self.is_lender and transfer.is_read else ()
            self.lent.update(lent)
            found.append(Transfer(transfer.number, is_right, 0.001, lent))
        self._tell()
        return found

    def _tell(self) -> None:
        names = self.names
        for name in self._told ^ names if self.tells and self.listener is not None else ():
            self.listener("STORAGE", name, name in names)
        self._told = names

    @property
    def names(self) -> set[bytes]:
        """Names that `find` can return."""
        return {name for name in self.contents if not name.startswith(_STALE)}

    def _end(self, transfer: _Transfer) -> list[bool]:
        is_right = []
        for name, slot in zip(transfer.names, transfer.slots, strict=True):
            if not transfer.is_read:
                (self.coming if self.awaits else self.contents)[name] = self.slots[slot]
                self.num_written += 1
                is_right.append(True)
                continue
            content = self.contents.get(name)
            if content is not None and self.rng.random() < self.share_lost:
                content = self.contents.pop(name)
                self.slots[slot], content = (["half of it"], content[1]), None
            elif content is not None and self.rng.random() < self.share_damaged:
                self.slots[slot] = (["damaged"], content[1])
                is_right.append(self.rng.random() < 0.5)
                continue
            if content is not None:
                self.slots[slot] = content
                self.num_read += 1
            is_right.append(content is not None)
        while len(self.contents) > self.capacity:
            del self.contents[next(iter(self.contents))]
        return is_right

    def discard(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.contents.pop(name, None)
            self.coming.pop(name, None)
        self._tell()

    def reset(self, *, external: bool) -> None:
        self.contents.clear()
        self.coming.clear()
        self._tell()
        # What is written now was computed before.
        for transfer in self.transfers:
            if not transfer.is_read:
                transfer.names = [_STALE + name for name in transfer.names]

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add nothing."""

    def close(self) -> None:
        self.is_closed = True
