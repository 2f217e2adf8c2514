"""The contents that prefill engines keep for requests of this engine, as a store behind host memory."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from jaxllm.kv_tiers.peers import client
from jaxllm.kv_tiers.peers.addresses import NotAllowedError
from jaxllm.kv_tiers.peers.client import Connection, Mapping, RefusedError, Target
from jaxllm.kv_tiers.peers.following import Following, Lease
from jaxllm.kv_tiers.peers.identity import Identity
from jaxllm.kv_tiers.peers.messages import Attached, Code
from jaxllm.kv_tiers.peers.peer import Peer
from jaxllm.kv_tiers.peers.reads import Reads, error_of
from jaxllm.kv_tiers.slot_store import Regions, SlotMemory, Transfer
from jaxllm.log import logger
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import PULL_FAILURES, SchedulerStats

RENEW_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""Connections to a prefill engine are closed that no request needed for so long."""
BAD_SECONDS = 60.0
"""A prefill engine that differs from this one is not asked again for so long."""
MAX_PEERS = 64


class PeerStore:
    """See SlotStore. `attach` adds the contents of a lease, `detach` removes them."""

    name, writes = "peer", False
    listener: TierListener | None = None
    """Never called: contents of other engines are not reported."""

    def __init__(
        self,
        own: Identity,
        memory: SlotMemory,
        wake: Callable[[], None],
        peers: Sequence[str] | None,
        timeout_seconds: float,
        regions: Regions | None = None,
    ):
        """peers: the option kv_peers. timeout_seconds: longest wait for any answer. regions: has devices read the memory of prefill engines
        on this host where it is; None: contents are copied to this engine's memory first."""
        self._own, self._memory, self._wake, self._timeout = own, memory, wake, timeout_seconds
        self._regions = regions
        self._connect_to = partial(client.Connection.to, own=own, memory=memory, peers=peers, seconds=timeout_seconds)
        self._lock = threading.RLock()
        self._peers: dict[Target, tuple[Peer, float]] = {}
        """With the time of the latest use."""
        self._met: set[Target] = set()
        """Prefill engines to which connections stay open, see `meet`."""
        self._closing: list[Peer] = []
        """Closed peers whose threads may not have ended."""
        self._bad: dict[Target, tuple[float, str]] = {}
        self._leases: dict[tuple[Target, str], Lease] = {}
        self._leases_of: dict[bytes, list[Lease]] = {}
        """The leases that have each content."""
        self._reads = Reads(self._lock, memory, wake, self._leases_of, self._note_read, regions)
        self._num_lent = self._reads.num_lent
        self._following = Following(self._lock, wake, self._note_failure)
        self._faults: dict[str, str] = {}
        """Why blocks of requests did not come."""
        self._stopping = threading.Event()
        self._timer: threading.Thread | None = None
        self.failures: Counter[str] = Counter()
        """Failed attempts to attach a lease or to read, by the names of PULL_FAILURES."""

    # Leases

    def meet(self, target: Target) -> None:
        """Connect to a prefill engine before a request needs it, and stay connected as long as it serves. To map its memory and to lock
        it for devices takes seconds, in which requests would have their blocks copied by the host."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._met.add(target)
            try:
                peer = self._peer(target)
            except (RefusedError, RuntimeError) as error:  # requests try again
                logger.debug("%s is not met: %s", target, error)
                return
            peer.meet().add_done_callback(partial(self._note_ended, peer))

    def attach(self, request_id: str, target: Target, number: str) -> "Future[Sequence[bytes]]":
        """Use a lease for a request. The future has the names of its contents, of which some may come later, or the error."""
        with self._lock:
            lease = self._leases.get((target, number))
            if lease is None:
                peer = self._peer(target)
                lease = self._leases[target, number] = Lease(number, peer, {request_id})
                peer.attach(number).add_done_callback(partial(self._note_attached, lease))
            lease.users.add(request_id)
            return lease.attached

    def detach(self, request_id: str) -> None:
        """A request needs no lease any more."""
        with self._lock:
            self._faults.pop(request_id, None)
            for lease in list(self._leases.values()):
                if request_id in lease.users:
                    lease.users.remove(request_id)
                    self._end_unused(lease)

    def end_lease(self, target: Target, number: str) -> None:
        """End a lease at a prefill engine, unless requests of this engine use it."""
        with self._lock:
            if (target, number) in self._leases:
                return
            try:
                peer = self._peer(target)
            except (RefusedError, RuntimeError):  # the second if there are too many threads; the lease ends by itself, later
                return
            peer.end(number).add_done_callback(partial(self._note_ended, peer))

    def fault_of(self, request_id: str) -> str | None:
        """Why blocks of a request did not come, or will not; None as long as all may."""
        with self._lock:
            return self._faults.get(request_id)

    def _blame(self, lease: Lease, text: str) -> None:
        self._faults.update(dict.fromkeys(lease.users, text))

    def _note_attached(self, lease: Lease, future: "Future[Attached]") -> None:
        with self._lock:
            if (error := error_of(future)) is not None:
                self._note_failure(lease, error)
                lease.attached.set_exception(error)
            else:
                answer = future.result()
                if self._is_known(lease):
                    if answer.is_complete:
                        self._add(lease, answer.names)
                    else:
                        self._following.begin(lease, answer.names)
                lease.attached.set_result(answer.names)
                self._end_unused(lease)
        self._wake()

    def _add(self, lease: Lease, names: Iterable[bytes]) -> None:
        """Find these contents in a lease from now on."""
        for name in names:
            self._leases_of.setdefault(name, []).append(lease)

    def take_news(self) -> list[bytes]:
        """Process what prefill engines told of the growth of leases; nothing changes in between, so that no plan finds a part of it.
        Returns contents that could be fetched and are wrong: requests may have them."""
        wrong: list[bytes] = []
        with self._lock:
            for lease, change in self._following.take(self._timeout):
                wrong += [name for name in change.lost if name in lease.stored]
                if not self._is_known(lease):
                    continue
                self._add(lease, change.stored)
                if change.lost:
                    self.failures["missing"] += 1
                    self._blame(lease, "it did not compute or store all of them")
                    self._remove(lease, change.lost)
        return wrong

    def _note_read(self, lease: Lease, missing: Sequence[bytes], error: BaseException | None) -> None:
        """A pull is over; these contents did not come, or all failed."""
        if error is not None:
            self._note_failure(lease, error)
            return
        if missing:
            logger.warning("%s has %d blocks no more, which are computed here", lease.peer.target, len(missing))
            self.failures["missing"] += 1
            self._blame(lease, "it has some of them no more")
            self._remove(lease, missing)
        self._end_unused(lease)

    def _note_ended(self, peer: Peer, future: "Future[None]") -> None:
        """A call is over that no request needed. An engine that did not answer it gives its place among MAX_PEERS to others."""
        if error_of(future) is not None:
            with self._lock:
                if not any(lease.peer is peer for lease in self._leases.values()):
                    self._drop(peer)

    def _end_unused(self, lease: Lease) -> None:
        """End a lease at the prefill engine that no request and no read needs."""
        if not lease.users and not lease.num_reads and lease.attached.done() and self._forget(lease):
            lease.peer.end(lease.number).add_done_callback(error_of)

    def _is_known(self, lease: Lease) -> bool:
        """Whether it has not been forgotten. Another may be known then under its number."""
        return self._leases.get((lease.peer.target, lease.number)) is lease

    def _forget(self, lease: Lease) -> bool:
        """Find nothing in a lease any more. Returns whether it was known."""
        if not self._is_known(lease):
            return False
        del self._leases[lease.peer.target, lease.number]
        self._following.forget(lease)
        if lease.attached.done() and error_of(lease.attached) is None:
            self._remove(lease, lease.attached.result())
        return True

    def _remove(self, lease: Lease, names: Iterable[bytes]) -> bool:
        """Find these contents in a lease no more. Returns whether any was found there."""
        was_found = False
        for name in names:
            found = self._leases_of.get(name, [])
            if lease in found:
                was_found = True
                found.remove(lease)
                if not found:
                    del self._leases_of[name]
        return was_found

    def _peer(self, target: Target) -> Peer:
        """Raises RefusedError."""
        until, text = self._bad.get(target, (0.0, ""))
        if time.monotonic() < until:
            raise RefusedError(Code.DIFFERS, text)
        self._bad.pop(target, None)
        found = self._peers.get(target)
        if found is None and len(self._peers) >= MAX_PEERS:
            raise RefusedError("peers", f"this engine is connected to {MAX_PEERS} prefill engines already")
        peer = Peer(target, self._connect, self._memory.block_bytes, self._regions) if found is None else found[0]
        self._peers[target] = peer, time.monotonic()
        if self._timer is None:
            self._timer = threading.Thread(target=self._run_timer, name="kv-renew", daemon=True)
            self._timer.start()
        return peer

    def _connect(self, target: Target, mapping: Mapping | None) -> Connection:
        return self._connect_to(target, mapping=mapping)

    def _note_failure(self, lease: Lease, error: BaseException) -> None:
        """A lease is of no use. Unless its engine refused it alone, the engine's other leases are not either."""
        target = lease.peer.target
        if not self._forget(lease):
            return  # an earlier failure, or it is not needed
        self.failures[reason_of(error)] += 1
        self._blame(lease, str(error) or type(error).__name__)
        if isinstance(error, RefusedError) and error.code == Code.LEASE:
            logger.warning("%s refuses: %s", target, error)
            return
        level = logger.error if isinstance(error, RefusedError) else logger.warning
        level("%s: %s", target, error or type(error).__name__)
        if isinstance(error, RefusedError) and error.code == Code.DIFFERS:
            self._bad[target] = time.monotonic() + BAD_SECONDS, str(error)
        self._drop(lease.peer)

    def _drop(self, peer: Peer) -> None:
        for other in [other for other in self._leases.values() if other.peer is peer]:
            self._blame(other, "the prefill engine is lost")
            self._forget(other)
        if self._peers.get(peer.target, (None, 0.0))[0] is peer:
            self._met.discard(peer.target)
            del self._peers[peer.target]
            peer.close()
            self._closing.append(peer)

    def _run_timer(self) -> None:
        """Renew leases, and close connections that are not needed."""
        while not self._stopping.wait(RENEW_SECONDS):
            with self._lock:
                now = time.monotonic()
                for target, (peer, used_at) in list(self._peers.items()):
                    leases = [lease for lease in self._leases.values() if lease.peer is peer]
                    if leases:
                        self._peers[target] = peer, now
                        renewing = peer.renew([lease.number for lease in leases])
                        renewing.add_done_callback(partial(self._note_renewed, leases[0]))
                    elif peer.is_left:  # its memory is not free as long as it is mapped here
                        self._drop(peer)
                    elif target in self._met:
                        peer.renew([]).add_done_callback(partial(self._note_ended, peer))  # or it takes this engine for lost
                    elif now - used_at > IDLE_SECONDS:
                        self._drop(peer)
                for target in self._met - self._peers.keys():
                    self.meet(target)
                for peer in self._closing:
                    peer.close()
                ended = [
                    peer for peer in self._closing if peer.has_ended and not self._num_lent[peer.mapped_region]
                ]  # others may wait for long, and leases must be renewed
                self._closing = [peer for peer in self._closing if peer not in ended]
            for peer in ended:
                peer.join()

    def _note_renewed(self, lease: Lease, future: "Future[None]") -> None:
        if (error := error_of(future)) is not None:
            with self._lock:
                self._note_failure(lease, error)

    # See SlotStore

    def find(self, names: Sequence[bytes]) -> Collection[bytes]:
        with self._lock:
            return [name for name in names if name in self._leases_of] if self._leases_of else ()

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        with self._lock:
            return [name for name in self._following.awaited(names) if name not in self._leases_of]

    def lends(self, names: Sequence[bytes]) -> Collection[bytes]:
        return self._reads.lends(names)

    def give_back(self, slot: int) -> None:
        self._reads.give_back(slot)

    def seconds(self, num_blocks: int) -> float:
        """No time: a router had the prompt computed elsewhere so that this engine does not."""
        return 0.0

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        self._reads.begin(number, names, slots)

    def finished(self) -> list[Transfer]:
        return self._reads.take_finished()

    def is_opening(self) -> bool:
        return False

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        return False

    def discard(self, names: Sequence[bytes]) -> None:
        with self._lock:
            for lease in self._leases.values():
                if self._remove(lease, names):
                    self.failures["damaged"] += 1
                    self._blame(lease, "some of them came damaged")

    def reset(self, *, external: bool) -> None:
        """Leases were of other weights, as far as this engine knows, and prefill engines must be compared with it anew."""
        with self._lock:
            self._own.forget_facts()
            self._bad.clear()
            for lease in list(self._leases.values()):
                if self._forget(lease):
                    lease.peer.end(lease.number).add_done_callback(error_of)
            self._closing += [peer for peer, _ in self._peers.values()]  # soon, once these are sent
            self._peers.clear()

    def add_stats(self, stats: SchedulerStats) -> None:
        """See SlotStore."""
        stats.pulled_bytes += self._reads.num_bytes
        stats.pull_failures = tuple(self.failures[reason] for reason in PULL_FAILURES)

    def close(self) -> None:
        self._stopping.set()
        with self._lock:
            for peer, _ in list(self._peers.values()):
                self._drop(peer)
            closing, self._closing = self._closing, []
        for peer in closing:
            peer.close()
        for peer in closing:
            peer.join()
        if self._timer is not None:
            self._timer.join()

    def check_integrity(self) -> None:
        """Raise AssertionError if a lease is kept for a request that has ended. Called without unfinished requests."""
        with self._lock:
            assert not any(lease.users for lease in self._leases.values()), "a lease is kept for a request that has ended"
            known = set(self._leases.values())
            assert all(lease in known for leases in self._leases_of.values() for lease in leases), (
                "a lease is found that has ended"
            )
            self._following.check_integrity(known)
            assert not self._faults, "faults are kept of requests that have ended"


def reason_of(error: BaseException) -> str:
    """One of PULL_FAILURES."""
    if isinstance(error, RefusedError):
        return {Code.DIFFERS: "differs", Code.LEASE: "missing"}.get(error.code, "refused")
    if isinstance(error, NotAllowedError):
        return "not_allowed"
    return "unreachable" if isinstance(error, OSError) else "lost"
