"""Host memory for contents of blocks."""

import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxllm.cache_spec import WORD_BYTES
from jaxllm.errors import ConfigError
from jaxllm.runner.block_format import BlockFormat

PAGE_BYTES = 4096
_PIECE_BYTES = 1 << 28
"""Memory that a thread touches at a time."""
_SPARE_BYTES = 8 << 30
"""Memory that is left to everything else, or a quarter of what there is."""
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where Linux says how much memory a container may use and uses: versions 2 and 1."""


REGION_BITS = 32
"""Bits of the index in a slot's number. Those above are 0 for the arena's own slots, and else the number of a lent region."""


def place(slot: int) -> tuple[int, int]:
    """The region of a slot, and its index there."""
    return slot >> REGION_BITS, slot & ((1 << REGION_BITS) - 1)


@dataclass(frozen=True)
class Region:
    """Slots of another process, whose memory is mapped here to be read."""

    words: np.ndarray
    """uint32 [slots, parts, words]"""
    sums: np.ndarray
    """As in the arena, which has them from the other process."""
    _num_lent: Counter[int] = field(default_factory=Counter)
    """How often slots are lent to copies, by index."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lend(self, index: int, sums: np.ndarray) -> bool:
        """See Regions.slot. Returns whether it is lent."""
        with self._lock:
            if self._num_lent[index] and not np.array_equal(self.sums[index], sums):
                return False
            self.sums[index] = sums
            self._num_lent[index] += 1
            return True

    def give_back(self, index: int) -> None:
        """It is lent once less."""
        with self._lock:
            self._num_lent[index] -= 1

    @property
    def address(self) -> int:
        """Address of the first slot."""
        return int(self.words.ctypes.data)


class Arena:
    """Slots for contents, each a whole number of pages: the parts of a block one after the other. Beside them the checksums of each."""

    def __init__(self, num_bytes: int, format: BlockFormat, *, is_shared: bool = False):
        """Takes no memory yet. is_shared: other processes may map it. Raises ConfigError if it has no slot."""
        self._format, self._is_shared = format, is_shared
        self.descriptor: int | None = None
        """File descriptor of all slots, if other processes may map it, only to read."""
        self.block_bytes = format.block_bytes
        self.slot_bytes = slot_bytes(format)
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise ConfigError(
                f"kv_offloading_size is {num_bytes / 2**30:.3g} GiB, less than a block ({self.slot_bytes} bytes); raise it"
            )
        self.regions: dict[int, Region] = {}
        """Lent slots, by the number of their region."""
        self._region_numbers = itertools.count(1)
        self.is_closing = False
        """Whether `stop` was called."""

    def open(self) -> None:
        """Take the memory. Raises ConfigError."""
        try:
            self._bytes = np.frombuffer(self._take(), np.uint8)
        except OSError as error:
            self._close_descriptor()
            raise ConfigError(
                f"kv_offloading_size is {self.num_bytes / 2**30:.3g} GiB: the system gives no {self.num_bytes} bytes ({error.strerror}); "
                "lower it, or leave it out"
            ) from error
        own = self._region(self._bytes)
        self.words, self.sums = own.words, own.sums
        """uint32 [slots, parts, words] and [slots, parts, sums]"""

    def _take(self) -> mmap.mmap:
        """Memory for all slots. Raises OSError."""
        return self._shared_memory() if self._is_shared else _private_memory(self.num_bytes)

    def _region(self, memory: np.ndarray) -> Region:
        format, slots = self._format, memory.view(np.uint32).reshape(-1, self.slot_bytes // WORD_BYTES)
        words = slots[:, : format.num_parts * format.part_words].reshape(len(slots), format.num_parts, -1)
        return Region(words, np.zeros((len(slots), format.num_parts, format.num_sums), np.uint32))

    def add_region(self, memory: mmap.mmap) -> int:
        """Give numbers to the slots of another arena, of the same format, that is mapped here. Returns that of its region."""
        whole = len(memory) // self.slot_bytes * self.slot_bytes
        number = next(self._region_numbers)
        self.regions[number] = self._region(np.frombuffer(memory, np.uint8, whole))
        return number

    def content(self, slots: Sequence[int], part: int) -> np.ndarray:
        """uint32 [n, words]: a part of the contents of slots, lent ones too."""
        return self._gathered(slots, lambda region: region.words[:, part])

    def sums_of(self, slots: Sequence[int]) -> np.ndarray:
        """uint32 [n, parts, sums]: their checksums."""
        return self._gathered(slots, lambda region: region.sums)

    def _gathered(self, slots: Sequence[int], array: "Callable[[Arena | Region], np.ndarray]") -> np.ndarray:
        if max(slots, default=0) >> REGION_BITS == 0:
            return array(self)[slots]
        places = map(place, slots)
        return np.stack([array(self.regions[region] if region else self)[index] for region, index in places])

    def _shared_memory(self) -> mmap.mmap:
        """Memory of a file without a name, whose size never changes. Raises OSError."""
        descriptor = os.memfd_create("jaxllm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, self.num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = _advised(mmap.mmap(descriptor, self.num_bytes))
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            return memory
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """Have `touch` return soon."""
        self.is_closing = True

    def close(self) -> None:
        """Give the memory back, once no other process maps it."""
        del self._bytes, self.words, self.sums
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def view(self, slot: int, count: int = 1) -> memoryview:
        """See SlotMemory. Valid until `close`."""
        return memoryview(self._bytes[self.offset(slot) : self.offset(slot + count - 1) + self.block_bytes])  # type: ignore[arg-type]

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return slot * self.slot_bytes

    @property
    def address(self) -> int:
        """Address of the first slot."""
        return self._bytes.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def touch(self) -> None:
        """Have the system give the memory now: to lock pages that are not there takes ten times as long. Uses several threads."""

        def touch(start: int) -> None:
            if not self.is_closing:
                self._bytes[start : start + _PIECE_BYTES : PAGE_BYTES] = 0

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "kv-touch") as threads:
            list(threads.map(touch, range(0, self.num_bytes, _PIECE_BYTES)))


def slot_bytes(format: BlockFormat) -> int:
    """Bytes of a slot."""
    return -(-format.block_bytes // PAGE_BYTES) * PAGE_BYTES


def _private_memory(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone. In huge pages where the system has them, which are touched and locked in a fraction of the time;
    systems give them to memory that processes share only if told to. A forked process does not get it: its copies on write would take pages
    away from under the devices' copies."""
    return _advised(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _advised(memory: mmap.mmap) -> mmap.mmap:
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):  # a system without it
            memory.madvise(getattr(mmap, name))
    return memory


def check_memory(num_bytes: int) -> None:
    """Raise ConfigError unless the machine, or its share of this process, has so much memory and some to spare."""
    free = min(free for _, free in _memory())
    spare = min(_SPARE_BYTES, free // 4)
    if num_bytes > free - spare:
        raise ConfigError(
            f"kv_offloading_size is {num_bytes / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB of memory are free, of which "
            f"{spare / 2**30:.3g} stay so; lower it to {(free - spare) / 2**30:.3g} or less"
        )


def check_total(num_bytes: int, num_engines: int) -> None:
    """Raise ConfigError unless there is so much memory at all: engines that start together each find free what all of them take."""
    total = min(total for total, _ in _memory())
    spare = min(_SPARE_BYTES, total // 4)
    if num_bytes > total - spare:
        raise ConfigError(
            f"kv_offloading_size is {num_bytes / 2**30:.3g} GiB for {num_engines} engines together, but there are {total / 2**30:.3g} "
            f"GiB of memory, of which {spare / 2**30:.3g} stay free; lower it to {(total - spare) / 2**30:.3g} or less"
        )


def _memory() -> list[tuple[int, int]]:
    """Total and free memory of the machine, and of the control group of this process if that has a limit. Cached files, such as weights
    that were read, count as free."""
    total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    found = [(total, free)]
    for directory, *names in _CONTROL_GROUPS:
        limit, used = (_read(f"{directory}/{name}").strip() for name in names)
        if limit.isdigit() and used.isdigit():
            lines = map(str.split, _read(f"{directory}/memory.stat").splitlines())
            cached = sum(int(count) for name, count in lines if name in ("active_file", "inactive_file"))
            found.append((int(limit), int(limit) - int(used) + cached))
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
