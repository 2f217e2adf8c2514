"""Threads that copy contents of a transfer one by one, and give a transfer up that takes too long."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxllm.kv_tiers.slot_store import Transfer

Job = Callable[[], None]


@dataclass(eq=False)
class PendingTransfer:
    """A transfer that is under way."""

    number: int
    is_right: list[bool]
    num_left: int
    """Contents that are not over."""
    begun: float = field(default_factory=time.monotonic)
    running: dict[int, float] = field(default_factory=dict)
    """When a thread began with a content, by index."""
    is_given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a slot is read or written, and to give the transfer up: nothing touches its slots afterwards."""


class TransferThreads:
    """Reads go before everything else, as requests wait for them. A transfer is given up if one of its contents takes too long, or if all
    threads do."""

    def __init__(self, num_threads: int, patience_seconds: float, wake: Callable[[], None]):
        """patience_seconds: for a content. wake: called when a transfer is over."""
        self._patience, self._wake = patience_seconds, wake
        self._condition = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._other: deque[Job] = deque()
        self._pending: dict[int, PendingTransfer] = {}
        self._over: deque[Transfer] = deque()
        self._last_return = time.monotonic()
        """When a thread last ended a job."""
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=f"kv-store-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that are not urgent and that no thread has begun."""
        return len(self._other)

    def begin(self, number: int, num_contents: int, copy: Callable[[PendingTransfer, int], bool], *, is_urgent: bool) -> None:
        """Begin a transfer. copy: copies the content of an index, and returns whether it did; it raises nothing."""
        transfer = self._pending[number] = PendingTransfer(number, [False] * num_contents, num_contents)

        def job(index: int) -> Job:
            return lambda: self._copy(transfer, index, copy)

        with self._condition:
            (self._urgent if is_urgent else self._other).extend(map(job, range(num_contents)))
            self._condition.notify(num_contents)

    def do(self, job: Job) -> None:
        """Have a thread call this, which raises nothing."""
        with self._condition:
            self._other.append(job)
            self._condition.notify()

    def finished(self) -> tuple[list[Transfer], int]:
        """The transfers that are over since the last call, and how many of these were given up."""
        found: list[Transfer] = []
        while self._over:
            found.append(self._over.popleft())
            del self._pending[found[-1].number]
        now = time.monotonic()
        late = [transfer for transfer in self._pending.values() if self._is_late(transfer, now - self._patience)]
        given_up = [transfer for transfer in late if self._give_up(transfer)]
        for transfer in given_up:
            found.append(Transfer(transfer.number, transfer.is_right, now - transfer.begun))
            del self._pending[transfer.number]
        return found, len(given_up)

    def _is_late(self, transfer: PendingTransfer, limit: float) -> bool:
        with transfer.lock:
            return min([max(transfer.begun, self._last_return), *transfer.running.values()]) < limit

    def _give_up(self, transfer: PendingTransfer) -> bool:
        with transfer.lock:
            transfer.is_given_up = transfer.num_left > 0
            return transfer.is_given_up

    def _copy(self, transfer: PendingTransfer, index: int, copy: Callable[[PendingTransfer, int], bool]) -> None:
        with transfer.lock:
            transfer.running[index] = time.monotonic()
        is_right = copy(transfer, index)
        with transfer.lock:
            if transfer.is_given_up:
                return
            del transfer.running[index]
            transfer.is_right[index] = is_right
            transfer.num_left -= 1
            is_over = not transfer.num_left
            if is_over:
                self._over.append(Transfer(transfer.number, transfer.is_right, time.monotonic() - transfer.begun))
        if is_over:
            self._wake()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()
            self._last_return = time.monotonic()

    def _next(self) -> Job | None:
        with self._condition:
            while not (self._urgent or self._other or self._is_closed):
                self._condition.wait()
            if self._is_closed:
                return None
            return (self._urgent or self._other).popleft()

    def close(self, seconds: float) -> bool:
        """Give all transfers up, and wait so long for the threads. Returns whether all have ended."""
        with self._condition:
            self._is_closed = True
            self._urgent.clear()
            self._other.clear()
            self._condition.notify_all()
        for transfer in self._pending.values():
            self._give_up(transfer)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
