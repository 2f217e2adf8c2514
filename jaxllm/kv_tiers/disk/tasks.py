"""Tasks of a disk store's threads: each reads a content or writes a file."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.kv_tiers.disk.folder import BlockFolder, Names
from jaxllm.kv_tiers.transfers import PendingTransfer, copy
from jaxllm.kv_tiers.workers import Task

if TYPE_CHECKING:
    from jaxllm.kv_tiers.disk.store import DiskStore


class FileTask(Task):
    """Some contents of a transfer that are in one file."""

    def __init__(
        self,
        store: "DiskStore",
        folder: BlockFolder,
        transfer: PendingTransfer,
        first: int,
        names: Sequence[bytes],
        slots: Sequence[int],
    ):
        """first: the place of the first content in the transfer; the others follow it."""
        self.store, self.folder, self.transfer, self.first = store, folder, transfer, first
        self.names, self.slots = tuple(names), slots

    def prepare(self, buffer: memoryview) -> None:
        """Do nothing: a read has no first part."""

    def complete(self) -> None:
        """Do nothing: a write has no last part."""


class ReadTask(FileTask):
    """Reads one content."""

    @cached_property
    def file(self) -> Names:
        """All contents of its file."""
        return self.store.known.file_of(self.names[0])

    def run(self, buffer: memoryview) -> None:
        self.found = self.folder.read(self.names[0], self.file, buffer)

    def complete(self) -> None:
        content, sums = self.found
        memory, (slot,) = self.store.memory, self.slots
        copy(content, to=memory.view(slot))
        memory.sums[slot] = np.frombuffer(sums, np.uint32).reshape(memory.sums[slot].shape)

    def end(self, error: Exception | None, seconds: float) -> None:
        self.store.end_read(self, error, seconds)


class WriteTask(FileTask):
    """Writes a whole file."""

    was_written = False

    def prepare(self, buffer: memoryview) -> None:
        memory, format = self.store.memory, self.folder.format
        for index, (name, slot) in enumerate(zip(self.names, self.slots, strict=True)):
            part = buffer[index * format.content_bytes : (index + 1) * format.content_bytes]
            format.pack(part, name, memory.view(slot), memory.sums[slot].tobytes())

    def run(self, buffer: memoryview) -> None:
        self.was_written = self.folder.write(self.names, buffer[: len(self.names) * self.folder.format.content_bytes])

    def end(self, error: Exception | None, seconds: float) -> None:
        self.store.end_write(self, error, seconds)
