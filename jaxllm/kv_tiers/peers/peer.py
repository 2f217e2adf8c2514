"""A prefill engine as a decode engine sees it: several connections, each with a thread."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from jaxllm.framing import ClosedError, WireError
from jaxllm.kv_tiers.peers.client import Connection, Mapping, Target
from jaxllm.kv_tiers.peers.messages import Attached, Change
from jaxllm.kv_tiers.slot_store import Regions
from jaxllm.worker_thread import WorkerThread

T = TypeVar("T")
NUM_CONNECTIONS = 8
"""Connections for contents, each with a thread. On a host with an H100 four threads copy 17 GB/s, eight 24, twelve no more."""
BATCH_BYTES = 16 << 20
"""Contents of one Pull."""


class Lane:
    """A thread with a connection, which is made when it is needed."""

    def __init__(self, connect: Callable[[], Connection], name: str):
        self._connect = connect
        self._thread = WorkerThread(name)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._is_closed = False

    def submit(self, call: Callable[[Connection], T]) -> "Future[T]":
        """Make a call with the connection, after all earlier ones."""
        return self._thread.submit(partial(self._run, call))

    def _run(self, call: Callable[[Connection], T]) -> T:
        is_old = self._connection is not None
        try:
            return self._use(call)
        except ClosedError:
            if not is_old:
                raise
        return self._use(call)  # the other end closes what was idle

    def _use(self, call: Callable[[Connection], T]) -> T:
        if self._connection is None:
            connection = self._connect()
            with self._lock:
                if self._is_closed:
                    connection.close()
                    raise ClosedError("this engine ends")
                self._connection = connection
        try:
            return call(self._connection)
        except WireError:
            with self._lock:
                self._connection.close()
                self._connection = None
            raise

    @property
    def is_left(self) -> bool:
        """Whether it has a connection that the other end has closed."""
        with self._lock:
            return not self._is_closed and self._connection is not None and self._connection.is_left

    def close(self) -> None:
        """Close the connection under the calls that use it; those that wait fail."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.interrupt()
        self._thread.abandon()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that `join` does not wait."""
        return not self._thread.is_alive

    def join(self) -> None:
        """Wait for the thread, once it was closed."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()


class Peer:
    """A prefill engine. Calls return at once; the errors of their futures are those of `Connection`."""

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target, "Mapping | None"], Connection],
        block_bytes: int,
        regions: Regions | None = None,
    ):
        """regions: see Mapping."""
        self.target, self._regions = target, regions
        self._mapping = Mapping(regions)
        self._control = Lane(partial(connect, target, None), "kv-peer")
        self._news = Lane(partial(connect, target, None), "kv-follow")
        self._lanes = [Lane(partial(connect, target, self._mapping), f"kv-pull-{index}") for index in range(NUM_CONNECTIONS)]
        self._next = 0
        self.is_closed = False
        self._batch_size = max(1, BATCH_BYTES // block_bytes)

    def meet(self) -> "Future[None]":
        """Connect, and begin to map its memory if it is on this host."""
        for lane in (self._news, self._lanes[0]):
            lane.submit(_nothing)
        return self._control.submit(_nothing)

    def attach(self, lease: str) -> "Future[Attached]":
        """See Connection, as for the next three."""
        return self._control.submit(lambda connection: connection.attach(lease))

    def follow(self, known: dict[str, tuple[int, int, bool]]) -> "Future[dict[str, Change | None]]":
        return self._news.submit(lambda connection: connection.follow(known))

    def renew(self, leases: Sequence[str]) -> "Future[None]":
        return self._control.submit(lambda connection: connection.renew(leases))

    def end(self, lease: str) -> "Future[None]":
        return self._control.submit(lambda connection: connection.end(lease))

    def pull(self, lease: str, names: Sequence[bytes], slots: Sequence[int]) -> "list[tuple[int, Future[list[bool]]]]":
        """Fetch contents in batches. Returns the future of each, with the index of its first content."""
        size = min(self._batch_size, -(-len(names) // NUM_CONNECTIONS))
        batches = []
        for start in range(0, len(names), size):
            part = slice(start, start + size)
            pull = partial(_pull, lease=lease, names=list(names[part]), slots=list(slots[part]))
            batches.append((start, self._lanes[self._next].submit(pull)))
            self._next = (self._next + 1) % NUM_CONNECTIONS
        return batches

    @property
    def region(self) -> int | None:
        """See Mapping. None once it is closed."""
        return None if self.is_closed else self._mapping.region

    @property
    def mapped_region(self) -> int | None:
        """See Mapping. Devices may read it even if it is closed."""
        return self._mapping.region

    def locate(self, lease: str, names: Sequence[bytes]) -> "Future[list[int | None]]":
        """See Connection. For a peer with a region."""
        region, regions = self._mapping.region, self._regions
        assert region is not None and regions is not None
        self._next = (self._next + 1) % NUM_CONNECTIONS
        find = partial(_locate, lease=lease, names=list(names), region=region, regions=regions)
        return self._lanes[self._next].submit(find)

    @property
    def is_left(self) -> bool:
        """Whether the prefill engine has closed its connection, because it has ended, or because nothing came for long."""
        return self._control.is_left

    def close(self) -> None:
        """Close all connections. Returns at once."""
        self.is_closed = True
        for lane in (self._control, self._news, *self._lanes):
            lane.close()

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended, so that `join` does not wait."""
        return all(lane.has_ended for lane in (self._control, self._news, *self._lanes))

    def join(self) -> None:
        """Wait for all threads, once it was closed."""
        for lane in (self._control, self._news, *self._lanes):
            lane.join()
        self._mapping.close()


def _nothing(connection: Connection) -> None:
    """It is connected."""


def _locate(connection: Connection, lease: str, names: Sequence[bytes], region: int, regions: Regions) -> list[int | None]:
    return connection.locate(lease, names, region, regions)


def _pull(connection: Connection, lease: str, names: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
    return connection.pull(lease, names, slots)
