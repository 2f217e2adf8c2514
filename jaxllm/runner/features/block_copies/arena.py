"""Host memory for contents of blocks."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.runner.features.block_copies.format import BlockFormat

PAGE_BYTES = 4096
_PIECE_BYTES = 1 << 30
"""Memory that a thread touches at a time."""
_SPARE_BYTES = 8 << 30
"""Memory that is left to everything else, or a quarter of what there is."""


class Arena:
    """Slots for contents, each a whole number of pages: the parts of a block one after the other. Beside them the checksums of each."""

    def __init__(self, num_bytes: int, format: BlockFormat):
        """Takes no memory yet. Raises ConfigError if there is not so much, or it has no slot."""
        self._format = format
        self.slot_bytes = -(-format.block_bytes // PAGE_BYTES) * PAGE_BYTES
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise ConfigError(
                f"kv_offloading_size is {num_bytes / 2**30:.3g} GiB, less than a block ({self.slot_bytes} bytes); raise it"
            )
        check_memory(num_bytes)

    def open(self) -> None:
        """Take the memory. Raises ConfigError."""
        format = self._format
        try:
            memory = mmap.mmap(-1, self.num_bytes)
        except OSError as error:
            raise ConfigError(f"kv_offloading_size is {self.num_bytes / 2**30:.3g} GiB: {error.strerror}; lower it") from error
        slots = np.frombuffer(memory, np.uint32).reshape(self.num_slots, -1)
        self.words = slots[:, : format.num_parts * format.part_words].reshape(self.num_slots, format.num_parts, -1)
        """uint32 [slots, parts, words]"""
        self.sums = np.zeros((self.num_slots, format.num_parts, format.num_sums), np.uint32)

    @property
    def address(self) -> int:
        """Address of the first slot."""
        return self.words.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def touch(self) -> None:
        """Have the system give the memory now: to lock pages that are not there takes ten times as long. Uses several threads."""
        bytes_of = np.lib.stride_tricks.as_strided(self.words.view(np.uint8).reshape(-1)[:1], (self.num_bytes,), (1,))

        def touch(start: int) -> None:
            bytes_of[start : start + _PIECE_BYTES : PAGE_BYTES] = 0

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "kv-touch") as threads:
            list(threads.map(touch, range(0, self.num_bytes, _PIECE_BYTES)))


def check_memory(num_bytes: int) -> None:
    """Raise ConfigError unless the machine, or its share of this process, has so much memory and some to spare."""
    free = min(_free_bytes())
    spare = min(_SPARE_BYTES, free // 4)
    if num_bytes > free - spare:
        raise ConfigError(
            f"kv_offloading_size is {num_bytes / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB of memory are free, of which "
            f"{spare / 2**30:.3g} stay so; lower it to {(free - spare) / 2**30:.3g} or less"
        )


def _free_bytes() -> list[int]:
    """Free memory of the machine, and of the control group of this process if that has a limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) << 10]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        found.append(int(limit) - int(used))
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
