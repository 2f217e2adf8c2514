"""Leases of a prefill engine: which contents it keeps for requests that another engine decodes, and for how long."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxllm.errors import JaxLLMError

LEASE_SECONDS = 30.0
"""A lease that is not renewed for so long ends."""
CLOSED_SECONDS = 10.0
"""A lease ends so long after the last connection that used it was closed."""
SHARE = 0.5
"""Largest part of the slots that leases keep."""


class NoLeaseError(JaxLLMError):
    """There is no such lease, or not any more."""


class Growth(NamedTuple):
    """Changes of a lease since some earlier state."""

    stored: Sequence[bytes]
    """Names whose contents can be fetched by now."""
    lost: Sequence[bytes]
    """Names whose contents never can be, or no longer: those that could be fetched before are wrong, or their slots are given away."""
    is_computing: bool
    """Whether the request that computes them is unfinished."""
    is_complete: bool
    """Whether no further content is to come."""


@dataclass(eq=False)
class Lease:
    """Contents that are kept together."""

    number: str
    """Random, since any engine that has it may fetch the contents."""
    names: Sequence[bytes]
    expires_at: float
    pending: set[bytes]
    """Names whose contents are not stored yet."""
    slots: dict[bytes, int] = field(default_factory=dict)
    """Where the others are; what has no slot is lost."""
    connections: set[object] = field(default_factory=set)
    num_readers: int = 0
    is_over: bool = False
    is_computing: bool = False
    """Whether the request that computes the contents is unfinished."""
    stored: list[bytes] = field(default_factory=list)
    """All names that were stored, in this order."""
    lost: list[bytes] = field(default_factory=list)
    """All names that were lost, before they were stored or later, in this order."""

    def growth(self, num_stored: int, num_lost: int) -> Growth:
        """The changes since so many contents were stored and lost."""
        return Growth(
            self.stored[num_stored:], self.lost[num_lost:], self.is_computing, not (self.pending or self.is_computing)
        )

    def drop(self, names: Collection[bytes]) -> None:
        """These of its contents are lost, if they are not already."""
        self.lost += [name for name in names if name in self.pending or name in self.slots]
        self.pending.difference_update(names)
        for name in self.slots.keys() & names:
            del self.slots[name]


class Leases:
    """All leases. The step loop's thread opens them and stores their contents, those of the server use and end them.

    The contents of a lease stay in their slots until `take_ended` returned it, which it does not while a thread reads them.
    """

    def __init__(self, max_blocks: int, clock: Callable[[], float] = time.monotonic):
        self.max_blocks, self._clock = max_blocks, clock
        self._leases: dict[str, Lease] = {}
        self._kept: Counter[bytes] = Counter()
        """How many leases have each content: to look at all their names takes long in the step loop."""
        self._changed = threading.Condition()
        self.num_opened = self.num_refused = self._num_expired = 0

    def __len__(self) -> int:
        """Leases that are not over, whether or not `take_ended` has returned the others."""
        with self._changed:
            return sum(not self._is_over(lease) for lease in self._leases.values())

    @property
    def num_expired(self) -> int:
        """Number of leases that ended because they were not renewed in time."""
        with self._changed:
            self._expire()
            return self._num_expired

    # The step loop's thread

    def open(self, names: Sequence[bytes], *, is_computing: bool = False) -> Lease | None:
        """A lease for contents that are about to be stored. None if too many are kept already. is_computing: see Lease."""
        with self._changed:
            if len(self._kept) + sum(name not in self._kept for name in set(names)) > self.max_blocks:
                self.num_refused += 1
                return None
            lease = Lease(secrets.token_hex(16), names, self._clock() + LEASE_SECONDS, set(names), is_computing=is_computing)
            self._leases[lease.number] = lease
            self._kept.update(names)
            self.num_opened += 1
            return lease

    def pending(self) -> list[Lease]:
        """Leases with contents that are not stored yet."""
        with self._changed:
            return [lease for lease in self._leases.values() if lease.pending and not lease.is_over]

    def note(self, lease: Lease, stored: Iterable[tuple[bytes, int]], lost: Collection[bytes] = ()) -> None:
        """Contents of a lease are in these slots, or will never be."""
        with self._changed:
            for name, slot in stored:
                lease.slots[name] = slot
                lease.stored.append(name)
                lease.pending.discard(name)
            lease.drop(lost)
            self._changed.notify_all()

    def end_computing(self, lease: Lease) -> None:
        """The request that computes the contents has ended."""
        with self._changed:
            lease.is_computing = False
            self._changed.notify_all()

    def lose(self, names: Collection[bytes]) -> None:
        """These contents are wrong, or their slots are given away."""
        with self._changed:
            for lease in self._leases.values():
                lease.drop(names)
            self._changed.notify_all()

    def take_ended(self) -> list[Lease]:
        """The leases that are over, which exist no longer: their slots are free for others."""
        with self._changed:
            self._expire()
            ended = [lease for lease in self._leases.values() if lease.is_over and not lease.num_readers]
            for lease in ended:
                del self._leases[lease.number]
                for name in lease.names:
                    self._kept[name] -= 1
                    if not self._kept[name]:
                        del self._kept[name]
            return ended

    def end_all(self) -> None:
        """End all leases."""
        with self._changed:
            self._expire()
            for lease in self._leases.values():
                lease.is_over = True
            self._changed.notify_all()

    # The server's threads

    def attach(self, number: str, connection: object) -> Sequence[bytes]:
        """Use a lease on a connection. Returns the names of its contents. Raises NoLeaseError."""
        with self._changed:
            lease = self._find(number)
            lease.connections.add(connection)
            lease.expires_at = self._clock() + LEASE_SECONDS
            return lease.names

    def growth(self, number: str, num_stored: int = 0, num_lost: int = 0) -> Growth:
        """See Lease. Raises NoLeaseError."""
        with self._changed:
            return self._find(number).growth(num_stored, num_lost)

    def follow(self, known: Mapping[str, tuple[int, int, bool]], seconds: float) -> dict[str, Growth | None]:
        """Wait, for at most so long, until any of these leases differs from what is known of it, or is complete: how many of its contents
        were stored and lost, and whether it is computed. Returns the growth of those; None for a lease that has ended."""

        def changes() -> dict[str, Growth | None]:
            found: dict[str, Growth | None] = {}
            for number, (num_stored, num_lost, is_computing) in known.items():
                lease = self._leases.get(number)
                if lease is None or self._is_over(lease):
                    found[number] = None
                    continue
                growth = lease.growth(num_stored, num_lost)
                if growth.stored or growth.lost or growth.is_complete or growth.is_computing != is_computing:
                    found[number] = growth
            return found

        with self._changed:
            return self._changed.wait_for(changes, seconds)

    def renew(self, numbers: Iterable[str], connection: object) -> None:
        """Leases are still needed; unknown ones are ignored."""
        with self._changed:
            for number in numbers:
                lease = self._leases.get(number)
                if lease is not None and not self._is_over(lease):
                    lease.connections.add(connection)
                    lease.expires_at = self._clock() + LEASE_SECONDS

    def end(self, number: str) -> None:
        """A lease is no longer needed; unknown ones are ignored."""
        with self._changed:
            self._expire()
            if (lease := self._leases.get(number)) is not None:
                lease.is_over = True
                self._changed.notify_all()

    def leave(self, connection: object) -> None:
        """A connection was closed."""
        with self._changed:
            for lease in self._leases.values():
                if connection in lease.connections:
                    lease.connections.remove(connection)
                    if not lease.connections:
                        lease.expires_at = min(lease.expires_at, self._clock() + CLOSED_SECONDS)

    @contextmanager
    def reading(self, number: str) -> Iterator[Callable[[bytes, float], int | None]]:
        """Read contents of a lease within this context: gives a function from a name to its slot, which waits so many seconds for a
        content that is not stored yet, and returns None if there is none. Raises NoLeaseError."""
        with self._changed:
            lease = self._find(number)
            lease.num_readers += 1
            lease.expires_at = max(lease.expires_at, self._clock() + LEASE_SECONDS)

        def slot_of(name: bytes, seconds: float) -> int | None:
            with self._changed:
                self._changed.wait_for(lambda: name not in lease.pending or self._is_over(lease), seconds)
                return None if self._is_over(lease) else lease.slots.get(name)

        try:
            yield slot_of
        finally:
            with self._changed:
                lease.num_readers -= 1

    def _find(self, number: str) -> Lease:
        lease = self._leases.get(number)
        if lease is None or self._is_over(lease):
            raise NoLeaseError("there is no such lease, or it has ended")
        return lease

    def _expire(self) -> None:
        now = self._clock()
        for lease in self._leases.values():
            if not lease.is_over and now >= lease.expires_at:
                lease.is_over = True
                self._num_expired += 1

    def _is_over(self, lease: Lease) -> bool:
        return lease.is_over or self._clock() >= lease.expires_at
