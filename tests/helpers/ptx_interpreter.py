"""Runs blocks of PTX (those of `collectives`) on several simulated GPUs at once, with everything late that may be.

Each thread is a Python generator that pauses at barriers, shuffles and polls; threads, CTAs and devices advance in random order and
at random speeds. A store to global memory becomes visible word by word after a random delay, at another device possibly after the
kernel's end; only stores of one device to one address keep their order, and a fence lets the thread's own arrive. Reading a register
that was never written is an error.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.helpers.ptx_translation import Meeting, TrapError, translate

__all__ = ["Launch", "Machine", "TrapError"]

MAX_ROUNDS = 20_000
NANOSECONDS_PER_ROUND = 10_000_000


@dataclass(frozen=True)
class Launch:
    """A kernel: its block of PTX, or what makes a thread's generator as `translate` does, and the addresses of its operands."""

    text: str | Callable[..., Iterator[Any]]
    pointers: tuple[int, ...]
    ctas: int
    threads: int


class Machine:
    """Several devices with one address space."""

    def __init__(self, num_devices: int, seed: int = 0, max_delay: int = 30):
        self.rng = random.Random(seed)
        self.num_devices, self.max_delay = num_devices, max_delay
        self.round = 0
        self._arrays: list[tuple[int, int, np.ndarray]] = []
        self._pending: list[_Store] = []
        self._newest: dict[tuple[int, int], int] = {}
        self._num_stores = 0

    def place(self, device: int, array: np.ndarray) -> int:
        """The address of a copy of an array, whole words, in a device's memory."""
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint32).copy()
        used = sum(len(found) * 4 + 4096 for _, owner, found in self._arrays if owner == device)
        address = (device + 1 << 40) + (used + 4095) // 4096 * 4096
        self._arrays.append((address, device, words))
        return address

    def words(self, address: int) -> np.ndarray:
        """The memory of an array, as uint32."""
        return next(found for start, _, found in self._arrays if start == address)

    def run(self, launches: Sequence[Sequence[Launch]]) -> None:
        """launches[d]: what device d runs, one kernel after the other. Raises TimeoutError if they do not end."""
        left = [list(reversed(found)) for found in launches]
        running: list[list[_Cta]] = [[] for _ in left]
        speed = [1.0] * len(left)
        for _ in range(MAX_ROUNDS):
            self.round += 1
            self._deliver()
            if not any(left) and not any(running):
                return
            if self.round % 40 == 0:
                speed = [self.rng.choice([0.05, 0.3, 1.0]) for _ in left]
            for device in range(len(left)):
                if self.rng.random() > speed[device]:
                    continue
                if not running[device] and left[device]:
                    launch = left[device].pop()
                    running[device] = [_Cta(self, device, index, launch) for index in range(launch.ctas)]
                for cta in running[device]:
                    if self.rng.random() < 0.7:
                        cta.advance()
                if running[device] and all(cta.has_ended for cta in running[device]):
                    running[device] = []
                    self._end_kernel(device)
        raise TimeoutError(f"no end after {MAX_ROUNDS} rounds: {[len(found) for found in left]} kernels have not begun")

    def settle(self) -> None:
        """Let every store arrive."""
        self.round += self.max_delay + 1
        self._deliver()

    # What threads do

    def load(self, address: int, size: int) -> int:
        assert address % size == 0, hex(address)
        _, words, index = self._find(address)
        if size == 2:
            return int(words[index]) >> 8 * (address % 4) & 0xFFFF
        return int(words[index]) if size == 4 else int(words[index]) | int(words[index + 1]) << 32

    def store(
        self, device: int, address: int, values: Sequence[int], has_system_scope: bool, thread: object = None, size: int = 4
    ) -> None:
        assert address % (size * len(values)) == 0, hex(address)
        owner, words, index = self._find(address)
        assert owner == device or has_system_scope, "a store to another device has system scope"
        mask, shift = (1 << 8 * size) - 1, 8 * (address % 4)
        for i, value in enumerate(values):
            key = (device, address + size * i)
            due = max(self.round + self.rng.randrange(self.max_delay), self._newest.get(key, 0))
            self._newest[key] = due
            self._num_stores += 1
            found = _Store(due, self._num_stores, device, owner, thread, index + i, words, value << shift, mask << shift)
            heapq.heappush(self._pending, found)

    def fence(self, device: int, thread: object) -> None:
        """Make visible what the thread stored."""
        self._finish(lambda store: store.device == device and store.thread == thread)

    def add(self, device: int, address: int, value: int, thread: object) -> int:
        """Add at once, and after what the thread stored; what was there before."""
        self.fence(device, thread)
        _, words, index = self._find(address)
        before = int(words[index])
        words[index] = before + value & 0xFFFFFFFF
        return before

    @property
    def clock(self) -> int:
        return 1 + self.round * NANOSECONDS_PER_ROUND

    def _find(self, address: int) -> tuple[int, np.ndarray, int]:
        for start, device, words in self._arrays:
            if start <= address < start + 4 * len(words):
                return device, words, (address - start) // 4
        raise IndexError(f"no memory at {address:#x}")

    def _deliver(self) -> None:
        while self._pending and self._pending[0].due <= self.round:
            heapq.heappop(self._pending).write()

    def _end_kernel(self, device: int) -> None:
        """A device's stores to its own memory are visible to its next kernel."""
        self._finish(lambda store: store.device == store.owner == device)

    def _finish(self, is_meant: Callable[["_Store"], bool]) -> None:
        for store in sorted(store for store in self._pending if is_meant(store)):
            store.write()
        self._pending = [store for store in self._pending if not is_meant(store)]
        heapq.heapify(self._pending)


@dataclass(order=True)
class _Store:
    """A store that has not arrived: a word, or half of one."""

    due: int
    number: int
    device: int = field(compare=False)
    owner: int = field(compare=False)
    thread: object = field(compare=False)
    index: int = field(compare=False)
    words: np.ndarray = field(compare=False)
    value: int = field(compare=False)
    mask: int = field(compare=False)

    def write(self) -> None:
        self.words[self.index] = int(self.words[self.index]) & ~self.mask & 0xFFFFFFFF | self.value


class _Cta:
    """The threads of one CTA."""

    def __init__(self, machine: Machine, device: int, index: int, launch: Launch):
        run = translate(launch.text) if isinstance(launch.text, str) else launch.text
        self.machine, self.shared = machine, dict[int, int]()
        arguments = (machine, self.shared, device, index, launch.pointers)
        self.threads: list[Iterator[Any] | None] = [run(thread, *arguments) for thread in range(launch.threads)]
        self.waits: list[Any] = [None] * launch.threads
        """Reason of each thread's pause: None, "barrier", a `Meeting`, or a shuffle's (value, distance)."""
        self.answers: list[int | None] = [None] * launch.threads
        self.slow_warp = machine.rng.randrange(launch.threads // 32)

    @property
    def has_ended(self) -> bool:
        return not any(self.threads)

    def advance(self) -> None:
        """Every thread that can goes on to its next pause, those of one warp seldom."""
        left_behind = self.slow_warp if self.machine.rng.random() < 0.8 else -1
        order = [
            t for t, wait in enumerate(self.waits) if wait is None and self.threads[t] is not None and t // 32 != left_behind
        ]
        self.machine.rng.shuffle(order)
        for t in order:
            thread: Any = self.threads[t]
            answer, self.answers[t] = self.answers[t], None
            try:
                self.waits[t] = thread.send(answer)
            except StopIteration:
                self.threads[t] = None
        for first in range(0, len(self.waits), 32):
            lanes = range(first, first + 32)
            if all(isinstance(self.waits[t], tuple) for t in lanes):
                for t in lanes:
                    self.answers[t] = self.waits[first + ((t - first) ^ self.waits[t][1])][0]
                for t in lanes:
                    self.waits[t] = None
        if all(wait == "barrier" for wait in self.waits):
            self.waits = [None] * len(self.waits)
        for meeting in {wait for wait in self.waits if isinstance(wait, Meeting)}:
            if self.waits.count(meeting) == meeting.size:
                self.waits = [None if wait == meeting else wait for wait in self.waits]
