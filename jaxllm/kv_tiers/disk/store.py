"""A store of contents in files, which outlive the engine and which engines on one directory share."""

import errno
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.kv_tiers import fingerprint
from jaxllm.kv_tiers.disk import janitor
from jaxllm.kv_tiers.disk.block_file import FileFormat
from jaxllm.kv_tiers.disk.folder import MAX_NAMES, BlockFolder, folder_of, next_epoch, prepare, read_epoch
from jaxllm.kv_tiers.disk.known_files import KnownFiles, by_content
from jaxllm.kv_tiers.disk.tasks import FileTask, ReadTask, WriteTask
from jaxllm.kv_tiers.pace import Pace
from jaxllm.kv_tiers.slot_store import SlotMemory, Transfer
from jaxllm.kv_tiers.transfers import PendingTransfer
from jaxllm.kv_tiers.workers import Workers, pair
from jaxllm.log import logger
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import SchedulerStats

NUM_READERS, NUM_WRITERS = 4, 2
READ_SECONDS, WRITE_SECONDS = 2.0, 10.0
"""A file that takes longer is given up."""
PAUSE_SECONDS = 60.0
"""Nothing is written for so long after a write failed."""
SCAN_SECONDS, SCAN_SHARE = 10.0, 0.05
"""The directory is read so often, but for less than this share of a thread's time: other engines write to it."""
_FIRST_RATE = 2e9
"""Bytes read in a second, before the first read."""
SMALL_BYTES = 256 << 10
"""Blocks below it share files."""
QUEUED_BYTES = 256 << 20
"""Most bytes that wait to be written, or one transfer."""
_TOLD_AT_ONCE = 1000
"""Most changes that are reported to the listener in a step."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_OF_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN)
"""Errors that say nothing of the file, which other engines may read."""


class DiskStore:
    """See SlotStore. One thread more reads the directory, makes room in it and removes files."""

    name, writes = "disk", True

    def __init__(
        self, root: Path, max_bytes: int, memory: SlotMemory, describe: Callable[[], dict[str, Any]], wake: Callable[[], None]
    ):
        """root: see `open_root`. max_bytes: of all files in it. describe: what contents depend on (`fingerprint.describe`); called again
        when weights may have changed."""
        self.memory, self._root, self._max_bytes, self._describe, self._wake = memory, root, max_bytes, describe, wake
        self._lock = threading.Lock()
        self._folder: BlockFolder | None = None
        """None: it has to be opened, or is being opened."""
        self._num_resets = 0
        self._is_opening = self._ends_epoch = False
        self._opening_until = 0.0
        self.known = KnownFiles()
        self._listener: TierListener | None = None
        self._used_bytes = self._needed_bytes = 0
        """Bytes of all files, and of a write that there was no room for."""
        self._making_room_until = 0.0
        self._refused: tuple[int, int] | None = None
        """Number and bytes of the first write that was refused since `finished` reported one."""
        self._paused_until = self._told_until = 0.0
        self._finished: list[Transfer] = []
        self._num_queued_writes = self._num_queued_reads = 0
        self._pace = Pace(memory.block_bytes, NUM_READERS, _FIRST_RATE)
        self._num_read = self._num_written = self._num_bad = 0
        self._read_seconds = self._write_seconds = 0.0
        self.content_bytes = self._format(b"").content_bytes
        self.blocks_per_file = MAX_NAMES if memory.block_bytes < SMALL_BYTES else 1
        of_write = self.blocks_per_file * self.content_bytes
        self._readers, self._writers = pair(
            lambda: Workers("kv-disk-read", NUM_READERS, self.content_bytes, READ_SECONDS),
            lambda: Workers("kv-disk-write", NUM_WRITERS, of_write, WRITE_SECONDS),
        )
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._scan_at = math.inf
        self._keeper = threading.Thread(target=self._keep, name="kv-disk-keeper", daemon=True)
        self._keeper.start()
        self._open_soon()

    def _format(self, digest: bytes) -> FileFormat:
        return FileFormat(digest, self.memory.block_bytes, self.memory.sums[0].nbytes)

    # See SlotStore

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        if self._folder is None:
            self._open_soon()
            return []
        return [] if self._readers.is_stuck else [name for name in names if name in self.known.files]

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        return ()

    def lends(self, names: Sequence[bytes]) -> Collection[bytes]:
        return ()

    def give_back(self, slot: int) -> None:
        """It lends nothing."""

    def seconds(self, num_blocks: int) -> float:
        return self._pace.seconds(num_blocks + self._num_queued_reads)

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        folder = self._folder
        if folder is None:
            self._finished.append(Transfer(number, [False] * len(names), 0.0))
            return
        self._begin(ReadTask, self._readers, folder, number, names, slots, 1)

    def is_opening(self) -> bool:
        if self._folder is not None:
            return bool(self._needed_bytes) and time.monotonic() < self._making_room_until
        self._open_soon()
        return time.monotonic() < self._opening_until

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        num_bytes = len(names) * self.content_bytes
        if not self._takes(num_bytes) or (folder := self._folder) is None:
            self._refused = self._refused or (number, num_bytes)
            return False
        self._begin(WriteTask, self._writers, folder, number, names, slots, self.blocks_per_file)
        return True

    def _takes(self, num_bytes: int) -> bool:
        """Whether so much can be written now. Opens the directory, or makes room in it, if need be."""
        if self._folder is None:
            self._open_soon()
            return False
        is_behind = self._num_queued_writes and self._num_queued_writes * self.content_bytes + num_bytes > QUEUED_BYTES
        is_full = self._used_bytes + num_bytes > self._max_bytes
        if is_full and not self._needed_bytes:
            self._needed_bytes, self._making_room_until = num_bytes, time.monotonic() + WRITE_SECONDS
            self._calls.put(self._scan)
        return not (is_behind or is_full or self._writers.is_stuck or time.monotonic() < self._paused_until)

    def _begin(
        self,
        kind: type[FileTask],
        workers: Workers,
        folder: BlockFolder,
        number: int,
        names: Sequence[bytes],
        slots: Sequence[int],
        size: int,
    ) -> None:
        """size: contents of a task."""
        transfer = PendingTransfer(number, len(names))
        with self._lock:
            if kind is ReadTask:
                self._num_queued_reads += len(names)
            else:
                self._num_queued_writes += len(names)
        for first in range(0, len(names), size):
            part = slice(first, first + size)
            workers.submit(kind(self, folder, transfer, first, names[part], slots[part]))

    def finished(self) -> list[Transfer]:
        self._readers.give_up()
        self._writers.give_up()
        with self._lock:
            found, self._finished = self._finished, []
            told = self.known.take_untold(_TOLD_AT_ONCE)
        if self._refused is not None and self._takes(self._refused[1]):
            found.append(Transfer(self._refused[0], (), 0.0))
            self._refused = None
        if self._listener is not None:
            for name, is_there in told:
                self._listener("STORAGE", name, is_there)
        return found

    @property
    def listener(self) -> TierListener | None:
        """See SlotStore."""
        return self._listener

    @listener.setter
    def listener(self, listener: TierListener | None) -> None:
        with self._lock:
            self._listener = listener
            if listener is None:
                self.known.is_listened_to = False
            else:
                self.known.tell_all()

    def discard(self, names: Sequence[bytes]) -> None:
        with self._lock:
            files = {file for name in names for file in self.known.possible_files(name)}
            for file in files:
                self.known.lose(file)
        if (folder := self._folder) is not None:
            for file in files:
                self._calls.put(partial(folder.unlink, file))

    def reset(self, *, external: bool) -> None:
        with self._lock:
            self._num_resets += 1
            self.known.clear()
            self._folder = None
            self._is_opening, self._ends_epoch = False, self._ends_epoch or external
        if external:
            self._open_soon()

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.disk_bytes += self._max_bytes
        stats.used_disk_bytes += self._used_bytes
        stats.num_disk_reads += self._num_read
        stats.num_disk_writes += self._num_written
        stats.disk_read_bytes += self._num_read * self.memory.block_bytes
        stats.disk_written_bytes += self._num_written * self.memory.block_bytes
        stats.disk_read_seconds += self._read_seconds
        stats.disk_write_seconds += self._write_seconds
        stats.num_bad_files += self._num_bad

    def close(self) -> None:
        self._readers.close(READ_SECONDS)
        self._writers.close(WRITE_SECONDS)
        self._calls.put(None)
        self._keeper.join(WRITE_SECONDS)

    # Ends of tasks, in their threads

    def end_read(self, task: ReadTask, error: Exception | None, seconds: float) -> None:
        """A content was read, or not."""
        is_missing = isinstance(
            error, FileNotFoundError | CancelledError
        )  # another engine made room, or the disk has no answer
        with self._lock:
            self._num_queued_reads -= 1
            self._read_seconds += seconds
            if error is None:
                self._num_read += 1
                self._pace.note(seconds)
            else:
                self._num_bad += not is_missing
                if task.folder is self._folder:  # else it is of contents that were dropped
                    self.known.lose(task.file)
        if error is not None and not is_missing:
            self._warn(
                f"a file of blocks cannot be used, and its tokens are computed again: {task.folder.path(task.file)}: {error}"
            )
            if getattr(error, "errno", None) not in _NOT_OF_FILE and not isinstance(error, TimeoutError | MemoryError):
                self._calls.put(partial(task.folder.unlink, task.file))
        self._end(task, error is None)

    def end_write(self, task: WriteTask, error: Exception | None, seconds: float) -> None:
        """A file was written, or not, or was there."""
        count = len(task.names)
        with self._lock:
            self._num_queued_writes -= count
            self._write_seconds += seconds
            if error is None and task.folder is self._folder:
                self.known.add(task.names)
            elif isinstance(error, TimeoutError) and task.folder is self._folder:
                self.known.give_up(task.names)
            if task.was_written:
                self._num_written += count
                self._used_bytes += count * self.content_bytes
        if error is not None and not isinstance(error, CancelledError):
            self._pause(error)
        self._end(task, error is None)

    def _end(self, task: FileTask, is_right: bool) -> None:
        over = None
        with self._lock:
            for index in range(task.first, task.first + len(task.names)):
                if (over := task.transfer.end(index, is_right)) is not None:
                    self._finished.append(over)
        if over is not None:
            self._wake()

    def _pause(self, error: Exception) -> None:
        if time.monotonic() < self._paused_until:
            return
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        reason = "it is full" if getattr(error, "errno", None) in _FULL else str(error)
        logger.warning("no blocks are written to %s for %d s: %s", self._root, PAUSE_SECONDS, reason)

    def _warn(self, message: str) -> None:
        """Say something, but not again and again."""
        if time.monotonic() >= self._told_until:
            self._told_until = time.monotonic() + PAUSE_SECONDS
            logger.warning("%s", message)

    # The directory, in a thread

    def _keep(self) -> None:
        while True:
            try:
                wait = self._scan_at - time.monotonic()
                call = self._calls.get(timeout=None if wait == math.inf else max(0.0, wait))
            except queue.Empty:
                call = self._scan
            if call is None:
                return
            try:
                call()
            except Exception as error:  # whatever it is: without this thread the directory would never be read again
                self._scan_at, self._opening_until = time.monotonic() + PAUSE_SECONDS, 0.0
                self._warn(f"{self._root} cannot be used now: {error}")

    def _open_soon(self) -> None:
        if not self._is_opening:
            self._is_opening, self._opening_until = True, time.monotonic() + WRITE_SECONDS
            self._calls.put(partial(self._open, self._num_resets))

    def _open(self, num_resets: int) -> None:
        """Find out what contents depend on now, and what there is of them."""
        described = self._describe()
        format = self._format(fingerprint.digest(described))
        prepare(self._root, format.fingerprint, described)
        if self._ends_epoch:
            next_epoch(folder_of(self._root, format.fingerprint))
            self._ends_epoch = False
        folder = BlockFolder(self._root, format)
        self._scan_folder(folder, num_resets)
        logger.info("disk: %d blocks in %s", len(self.known.files), folder.folder)

    def _scan(self) -> None:
        folder, num_resets, self._scan_at = self._folder, self._num_resets, math.inf
        if folder is None:
            if self._is_opening:  # it failed before
                self._open(num_resets)
        else:
            is_over = read_epoch(folder.folder) != folder.epoch  # another engine ended it
            self._scan_folder(BlockFolder(self._root, folder.format) if is_over else folder, num_resets)

    def _scan_folder(self, folder: BlockFolder, num_resets: int) -> None:
        """Read the directory, and make room in it if need be."""
        start = time.monotonic()
        with self._lock:
            self.known.begin_scan()
        usage, most = janitor.measure(self._root), self._max_bytes - self._needed_bytes
        if (usage.has_waste or usage.num_bytes > most) and janitor.make_room(self._root, most):
            usage = janitor.measure(self._root)
        found = by_content(folder.files())
        with self._lock:
            if num_resets == self._num_resets:
                self.known.end_scan(*found)
                self._folder = folder
            self._used_bytes = usage.num_bytes
            if self._used_bytes + self._needed_bytes <= self._max_bytes:  # else another process makes room
                self._needed_bytes = 0
        end = time.monotonic()
        self._scan_at = end + max(SCAN_SECONDS, (end - start) / SCAN_SHARE)
