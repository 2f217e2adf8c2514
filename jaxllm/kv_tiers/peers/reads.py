"""Reads of contents that leases have: batches of each go over several connections, or the prefill engine's slots are lent."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxllm.kv_tiers.contents import NO_SLOT
from jaxllm.kv_tiers.peers.following import Lease
from jaxllm.kv_tiers.slot_store import Regions, SlotMemory, Transfer


@dataclass(eq=False)
class _Read:
    """A read that is under way."""

    number: int
    names: Sequence[bytes]
    is_right: list[bool]
    num_left: int
    """Batches that are not over."""
    slots: list[int] = field(default_factory=list)
    """The slots of contents that it lends."""
    began: float = field(default_factory=time.monotonic)


_Pull = tuple[Lease, list[int], "Future[Any]"]
"""A lease, the indices of its contents in the read, and the future that has for each whether it came, or its slot."""


class Reads:
    """The reads of a store, see SlotStore."""

    def __init__(
        self,
        lock: "threading.RLock",
        memory: SlotMemory,
        wake: Callable[[], None],
        leases_of: Mapping[bytes, Sequence[Lease]],
        note: Callable[[Lease, Sequence[bytes], BaseException | None], None],
        regions: Regions | None,
    ):
        """lock: of the store, held while `note` is called: with the lease of each pull that is over, the contents that did not come, and
        the error if all failed. leases_of: by content, the latest is read. regions: see PeerStore."""
        self._lock, self._memory, self._wake, self._leases_of, self._note = lock, memory, wake, leases_of, note
        self._regions = regions
        self._finished: list[Transfer] = []
        self.num_lent: Counter[int | None] = Counter()
        """Slots of each region that were not given back."""
        self.num_bytes = 0

    def lends(self, names: Sequence[bytes]) -> Collection[bytes]:
        """See SlotStore."""
        with self._lock:
            if self._regions is None or not self._leases_of:
                return ()
            return [name for name in names if (found := self._leases_of.get(name)) and found[-1].peer.region is not None]

    def give_back(self, slot: int) -> None:
        """See SlotStore."""
        assert self._regions is not None
        with self._lock:
            self.num_lent[self._regions.region_of(slot)] -= 1
        self._regions.give_back(slot)

    def begin(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """See `SlotStore.read`."""
        with self._lock:
            if slots:
                self._begin(_Read(number, names, [False] * len(names), 0), self._pull(names, slots))
            else:
                self._begin(_Read(number, names, [False] * len(names), 0, [NO_SLOT] * len(names)), self._locate(names))

    def _by_lease(self, names: Sequence[bytes]) -> dict[Lease, list[int]]:
        """The indices of the contents that each lease has."""
        found: dict[Lease, list[int]] = {}
        for index, name in enumerate(names):
            if leases := self._leases_of.get(name):
                found.setdefault(leases[-1], []).append(index)
        return found

    def _pull(self, names: Sequence[bytes], slots: Sequence[int]) -> list[_Pull]:
        pulls: list[_Pull] = []
        for lease, indices in self._by_lease(names).items():
            batches = lease.peer.pull(lease.number, [names[index] for index in indices], [slots[index] for index in indices])
            ends = [start for start, _ in batches[1:]] + [len(indices)]
            pulls += [(lease, indices[start:end], future) for (start, future), end in zip(batches, ends, strict=True)]
        return pulls

    def _locate(self, names: Sequence[bytes]) -> list[_Pull]:
        """Begin to lend contents."""
        return [
            (lease, indices, lease.peer.locate(lease.number, [names[index] for index in indices]))
            for lease, indices in self._by_lease(names).items()
            if lease.peer.region is not None
        ]

    def _begin(self, read: _Read, pulls: list[_Pull]) -> None:
        read.num_left = len(pulls)
        if not pulls:
            self._finish(read)
        for lease, _, _ in pulls:  # before the first is over
            lease.num_reads += 1
        for lease, part, future in pulls:
            future.add_done_callback(partial(self._note_pulled, read, lease, part))

    def _note_pulled(self, read: _Read, lease: Lease, indices: Sequence[int], future: "Future[Any]") -> None:
        with self._lock:
            lease.num_reads -= 1
            error, missing = error_of(future), list[bytes]()
            if error is None:
                came = [self._take(read, *each) for each in zip(indices, future.result(), strict=True)]
                missing = [read.names[index] for index, right in zip(indices, came, strict=True) if not right]
            self._note(lease, missing, error)
            read.num_left -= 1
            if not read.num_left:
                self._finish(read)

    def _take(self, read: _Read, index: int, found: bool | int | None) -> bool:
        """Whether a content came: it says so, or has the slot where it is lent."""
        came = found if isinstance(found, bool) else found is not None
        if came and read.slots:
            assert found is not None and self._regions is not None
            read.slots[index] = found
            self.num_lent[self._regions.region_of(found)] += 1
        read.is_right[index] = came
        self.num_bytes += came * self._memory.block_bytes
        return came

    def _finish(self, read: _Read) -> None:
        self._finished.append(Transfer(read.number, read.is_right, time.monotonic() - read.began, read.slots))
        self._wake()

    def take_finished(self) -> list[Transfer]:
        """See `SlotStore.finished`."""
        with self._lock:
            found, self._finished = self._finished, []
            return found


def error_of(future: "Future[Any]") -> BaseException | None:
    """The error of a future that is done, also if it was cancelled."""
    try:
        return future.exception()
    except CancelledError as error:
        return error
