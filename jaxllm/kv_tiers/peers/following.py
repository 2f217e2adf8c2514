"""Leases whose contents come while a prefill engine computes them: which can be fetched by now."""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxllm.kv_tiers.peers.client import RefusedError
from jaxllm.kv_tiers.peers.messages import Change, Code
from jaxllm.kv_tiers.peers.peer import Peer


@dataclass(eq=False)
class Lease:
    """A lease at a prefill engine that requests of this engine use."""

    number: str
    peer: Peer
    users: set[str] = field(default_factory=set)
    attached: "Future[Sequence[bytes]]" = field(default_factory=Future)
    """Once it is done, the contents can be found that can be fetched."""
    num_reads: int = 0
    """Pulls under way."""
    awaited: set[bytes] = field(default_factory=set)
    """Contents that may come, but cannot be fetched yet."""
    stored: set[bytes] = field(default_factory=set)
    """Contents that came since it was attached."""
    num_stored: int = 0
    num_lost: int = 0
    """Contents that the prefill engine told of as stored, and as lost."""
    is_computing: bool = True
    """Whether the prefill engine computes the rest; if not, it only stores it."""
    grew_at: float = field(default_factory=time.monotonic)


class Following:
    """The leases that grow. One connection to each prefill engine waits for changes of all; they take effect with `take`."""

    def __init__(self, lock: Any, wake: Callable[[], None], fail: Callable[[Lease, BaseException], None]):
        """lock: of the store, held in all calls. wake: called with changes. fail: called with a lease that is of no use, and why."""
        self._lock, self._wake, self._fail = lock, wake, fail
        self._growing: dict[Lease, None] = {}
        """Leases that prefill engines are asked for."""
        self._awaiting: dict[Lease, None] = {}
        """Leases with contents that may come."""
        self._asked: set[Peer] = set()
        """Prefill engines that have yet to answer."""
        self._news: list[tuple[Lease, Change]] = []

    def begin(self, lease: Lease, names: Sequence[bytes]) -> None:
        """These contents of a lease come, or some of them."""
        lease.awaited.update(names)
        self._growing[lease] = self._awaiting[lease] = None
        self._ask(lease.peer)

    def forget(self, lease: Lease) -> None:
        """A lease has ended."""
        self._growing.pop(lease, None)
        self._awaiting.pop(lease, None)

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that may come."""
        found = [lease.awaited for lease in self._awaiting]
        return {name for name in names if any(name in awaited for awaited in found)} if found else ()

    def take(self, timeout_seconds: float) -> list[tuple[Lease, Change]]:
        """The changes since the last call. timeout_seconds: longest wait for contents that are computed and not stored."""
        if not (self._news or self._awaiting):
            return []
        news, self._news = self._news, []
        now = time.monotonic()
        late = [each for each in self._growing if not each.is_computing and now - each.grew_at > timeout_seconds]
        for lease in late:
            del self._growing[lease]
            news.append((lease, Change([], list(lease.awaited), False, True)))
        changes = [(lease, _apply(lease, change)) for lease, change in news]
        for lease, change in changes:
            if change.is_complete:
                lease.awaited.clear()
                self._awaiting.pop(lease, None)
        return changes

    def _ask(self, peer: Peer) -> None:
        leases = [lease for lease in self._growing if lease.peer is peer]
        if leases and peer not in self._asked and not peer.is_closed:
            self._asked.add(peer)
            known = {lease.number: (lease.num_stored, lease.num_lost, lease.is_computing) for lease in leases}
            peer.follow(known).add_done_callback(partial(self._note, peer, leases))

    def _note(self, peer: Peer, asked: Sequence[Lease], future: "Future[dict[str, Change | None]]") -> None:
        with self._lock:
            self._asked.discard(peer)
            leases = [lease for lease in asked if lease in self._growing]
            try:
                found = future.result()
            except (Exception, CancelledError) as error:
                found = {}
                for lease in leases:
                    self._fail(lease, error)
            for lease in leases:
                if lease.number in found:
                    self._note_change(lease, found[lease.number])
            self._ask(peer)
        if found or leases:
            self._wake()

    def _note_change(self, lease: Lease, change: Change | None) -> None:
        if change is None:
            self._fail(lease, RefusedError(Code.LEASE, "there is no such lease, or it has ended"))
            return
        lease.num_stored += len(change.stored)
        lease.num_lost += len(change.lost)
        lease.is_computing, lease.grew_at = change.is_computing, time.monotonic()
        if change.is_complete:
            del self._growing[lease]
        self._news.append((lease, change))

    def check_integrity(self, known: Collection[Lease]) -> None:
        """Raise AssertionError if a lease is followed that is not known."""
        assert all(lease in known for lease in (*self._growing, *self._awaiting)), "a lease grows that has ended"


def _apply(lease: Lease, change: Change) -> Change:
    """Note a change in its lease. Returns the part of it that is about contents of the lease, each once: a prefill engine may send
    anything."""
    stored = [name for name in dict.fromkeys(change.stored) if name in lease.awaited]
    lease.awaited.difference_update(stored)
    lease.stored.update(stored)
    lost = [name for name in dict.fromkeys(change.lost) if name in lease.awaited or name in lease.stored]
    lease.awaited.difference_update(lost)
    return Change(stored, lost, change.is_computing, change.is_complete)
