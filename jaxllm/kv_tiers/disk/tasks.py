"""Tasks of a disk store's threads: each reads or writes one file of a transfer."""

from typing import TYPE_CHECKING

import numpy as np

from jaxllm.kv_tiers.disk.folder import BlockFolder
from jaxllm.kv_tiers.transfers import PendingTransfer, copy
from jaxllm.kv_tiers.workers import Task

if TYPE_CHECKING:
    from jaxllm.kv_tiers.disk.store import DiskStore


class FileTask(Task):
    """One file of a transfer."""

    def __init__(self, store: "DiskStore", folder: BlockFolder, transfer: PendingTransfer, index: int, name: bytes, slot: int):
        self.store, self.folder, self.transfer, self.index, self.name, self.slot = store, folder, transfer, index, name, slot

    def prepare(self, buffer: memoryview) -> None:
        """Do nothing: a read has no first part."""

    def complete(self) -> None:
        """Do nothing: a write has no last part."""


class ReadTask(FileTask):
    def run(self, buffer: memoryview) -> None:
        self.found = self.folder.read(self.name, buffer)

    def complete(self) -> None:
        content, sums = self.found
        memory = self.store.memory
        copy(content, to=memory.view(self.slot))
        memory.sums[self.slot] = np.frombuffer(sums, np.uint32).reshape(memory.sums[self.slot].shape)

    def end(self, error: Exception | None, seconds: float) -> None:
        self.store.end_read(self, error, seconds)


class WriteTask(FileTask):
    was_written = False

    def prepare(self, buffer: memoryview) -> None:
        memory = self.store.memory
        self.folder.format.pack(buffer, self.name, memory.view(self.slot), memory.sums[self.slot].tobytes())

    def run(self, buffer: memoryview) -> None:
        self.was_written = self.folder.write(self.name, buffer)

    def end(self, error: Exception | None, seconds: float) -> None:
        self.store.end_write(self, error, seconds)
