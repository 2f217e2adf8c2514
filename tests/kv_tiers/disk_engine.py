"""A store of files with the slots that it reads and writes, as the step loop uses it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.kv_tiers.disk.block_file import PAGE_BYTES
from jaxllm.kv_tiers.disk.folder import open_root
from jaxllm.kv_tiers.disk.store import DiskStore
from jaxllm.kv_tiers.slot_store import Transfer
from jaxllm.scheduler_stats import SchedulerStats

NUM_SLOTS, BLOCK_BYTES = 8, 5000
NAMES = [bytes([number]) * 32 for number in range(NUM_SLOTS)]
FILE_BYTES = PAGE_BYTES + 2 * PAGE_BYTES
MODEL = {"model": "a"}


class Memory:
    """Slots with random contents."""

    block_bytes = BLOCK_BYTES

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.bytes = rng.integers(0, 256, (NUM_SLOTS, BLOCK_BYTES), np.uint8)
        self.sums = rng.integers(0, 2**32, (NUM_SLOTS, 2, 3), np.uint32)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.bytes[slot])  # type: ignore[arg-type]

    def has(self, slot: int, other: "Memory", of: int) -> bool:
        return bool(np.all(self.bytes[slot] == other.bytes[of]) and np.all(self.sums[slot] == other.sums[of]))


class Engine:
    """A store with its memory, as the step loop uses it."""

    def __init__(self, root: Path, seed: int, max_bytes: int, model: dict[str, Any], blocks_per_file: int = 1):
        self.memory, self.num_wakes, self.number = Memory(seed), 0, 0
        self.model = dict(model)
        self.store = DiskStore(open_root(root), max_bytes, self.memory, lambda: dict(self.model), self._wake)
        self.store.blocks_per_file = blocks_per_file
        self.over: dict[int, Transfer] = {}
        self.until(lambda: self.store._folder is not None)

    def _wake(self) -> None:
        self.num_wakes += 1

    def until(self, is_so: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, "it does not happen"
            time.sleep(0.002)
            self.over.update({transfer.number: transfer for transfer in self.store.finished()})

    def end(self, number: int) -> list[bool]:
        """Whether each content of a transfer is right, once it is over."""
        self.until(lambda: number in self.over)
        return list(self.over[number].is_right)

    def write(self, *numbers: int) -> list[bool]:
        """Write the contents of slots with these numbers under the names with the same."""
        self.number += 1
        assert self.store.write(self.number, [NAMES[number] for number in numbers], numbers)
        return self.end(self.number)

    def read(self, name: int, slot: int) -> bool:
        self.number += 1
        self.store.read(self.number, [NAMES[name]], [slot])
        return self.end(self.number)[0]

    def find(self) -> list[int]:
        return [NAMES.index(name) for name in self.store.find(NAMES)]

    def scan(self) -> None:
        """Read the directory now."""
        done: list[bool] = []
        self.store._calls.put(self.store._scan)
        self.store._calls.put(lambda: done.append(True))
        self.until(lambda: done)

    def path(self, name: int) -> Path:
        """Path of the file that contains this content, or that would contain it alone."""
        assert self.store._folder is not None
        return Path(self.store._folder.path(self.store.known.file_of(NAMES[name])))

    @property
    def stats(self) -> SchedulerStats:
        stats = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0)
        self.store.add_stats(stats)
        return stats


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name not in ("lock", "epoch", "meta.json")]
