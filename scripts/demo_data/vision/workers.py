"""Processes that fill batches in shared memory, so that the training does not wait for them."""

import multiprocessing
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .rows import Batch, BatchMaker, BatchShape


def _work(tokenizer_file: Path, shape: BatchShape, seed: str, names: list[str], empty: Any, full: Any) -> None:
    """A worker: takes the number of an empty slot, fills it, hands it over."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    maker = BatchMaker(Tokenizer.from_file(str(tokenizer_file)), shape, seed)
    # The parent process owns the memory and frees it.
    slots = [SharedMemory(name) for name in names]
    while (slot := empty.get()) is not None:
        full.put((slot, maker.fill(shape.batch(slots[slot].buf))))


class Workers:
    """Batches from several processes."""

    def __init__(self, shape: BatchShape, empty: Any, full: Any, slots: list[SharedMemory], processes: list[Any]):
        self._shape = shape
        self._empty = empty
        self._full = full
        self._slots = slots
        self._processes = processes
        self.num_taken = 0
        self._filled = np.zeros(2)

    @property
    def filled(self) -> tuple[float, float]:
        """Mean shares of tokens and of patches of the batches taken that are not padding."""
        tokens, patches = self._filled / max(1, self.num_taken)
        return float(tokens), float(patches)

    def take(self, timeout: float) -> Batch | None:
        """A copy of the next batch; None: there was none for so many seconds. Raises RuntimeError if a worker has ended."""
        try:
            slot, filled = self._full.get(timeout=timeout)
        except queue.Empty:
            if not all(process.is_alive() for process in self._processes):
                raise RuntimeError("a process that draws pictures has ended; its error is above") from None
            return None
        batch = Batch(*(np.array(array) for array in self._shape.batch(self._slots[slot].buf)))
        self._empty.put(slot)
        self.num_taken += 1
        self._filled += filled
        return batch


@contextmanager
def working(tokenizer_file: Path, shape: BatchShape, seed: int, num_processes: int, slots_each: int = 2) -> Iterator[Workers]:
    """Runs the processes."""
    context = multiprocessing.get_context("spawn")
    empty, full = context.Queue(), context.Queue()
    slots = [SharedMemory(create=True, size=shape.num_bytes) for _ in range(num_processes * slots_each)]
    names = [slot.name for slot in slots]
    for slot in range(len(slots)):
        empty.put(slot)
    processes = [
        context.Process(target=_work, args=(tokenizer_file, shape, f"{seed}|{number}", names, empty, full), daemon=True)
        for number in range(num_processes)
    ]
    try:
        for process in processes:
            process.start()
        yield Workers(shape, empty, full, slots, processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)
        for slot in slots:
            slot.close()
            slot.unlink()
