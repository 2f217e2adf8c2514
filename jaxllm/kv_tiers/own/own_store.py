"""Copies contents between slots of host memory and a user-defined store, whose failures cost no request."""

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.kv_tiers.fingerprint import digest
from jaxllm.kv_tiers.kv_store import KVStore, StoreContext
from jaxllm.kv_tiers.own.calls import DIGEST_BYTES, ContentCall, OtherCall, Read, Write
from jaxllm.kv_tiers.pace import Pace
from jaxllm.kv_tiers.slot_store import SlotMemory, Transfer
from jaxllm.kv_tiers.transfers import PendingTransfer, copy
from jaxllm.kv_tiers.workers import Workers, pair
from jaxllm.log import logger, warn_once
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import STORE_CALLS, SchedulerStats
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig

MAX_FAILURES = 8
"""After so many in a row the store is left alone for a while."""
PAUSE_SECONDS = 60.0
PATIENCE_SECONDS = 10.0
"""A call that takes longer is given up."""
CLOSE_SECONDS = 5.0
"""How long the end of an engine waits for calls of the store."""
MAX_WAITING_PER_THREAD = 16
"""If so many contents wait to be written, no more are taken."""
SLOW_FIND_SECONDS = 0.05
_FIRST_RATE = 1e9
"""Bytes read in a second, before the first read."""


class OwnStore:
    """A `SlotStore` over a `KVStore`. A content has the digest of its key and the checksums of the devices before the block, so that one
    that the store mixed up or damaged is noticed. The store gets the buffer of a thread, never a slot."""

    listener: TierListener | None = None
    """Never called: the store has no list of its contents, only `find`."""

    def __init__(
        self,
        kind: type[KVStore],
        config: KVTransferConfig,
        memory: SlotMemory,
        describe: Callable[[], dict[str, Any]],
        wake: Callable[[], None],
        patience_seconds: float = PATIENCE_SECONDS,
    ):
        """describe: what contents depend on (`fingerprint.describe`); called again when weights may have changed. wake: see SlotStore.
        Raises ConfigError if the class cannot make a store, or OutOfMemoryError."""
        self.name = kind.__name__
        self.writes = config.kv_role != "kv_consumer"
        self._reads = config.kv_role != "kv_producer"
        self._memory, self._describe, self._wake = memory, describe, wake
        self._start = DIGEST_BYTES + memory.sums[0].nbytes
        """Bytes before the block."""
        content_bytes = self._start + memory.block_bytes
        self._prefix: str | None = _prefix_of(describe())
        """Beginning of all keys; None: it has to be found, or is being found."""
        self._finding: OtherCall | None = None
        """The last call that finds it."""
        self._is_closed = False
        self._num_resets = 0
        self._pace = Pace(memory.block_bytes, 1, _FIRST_RATE)
        """Estimate of all threads together."""
        self._lock = threading.Lock()
        self._num_writing = 0
        """Contents of writes that are not over."""
        self._over: deque[Transfer] = deque()
        self._num_read = self._num_written = 0
        """Contents that were."""
        self._read_seconds = self._write_seconds = 0.0
        self._failures: Counter[str] = Counter()
        """All failures, by the method."""
        self._num_failed = 0
        """Failures since the last call that did not fail."""
        self._paused_until = 0.0
        self._refused: int | None = None
        """The first write that was refused since `finished` reported one."""
        self._told: set[str] = set()
        """Methods whose failure was logged."""
        try:
            self._store = kind(StoreContext(config, content_bytes))
        except Exception as error:  # whatever the class raises
            raise ConfigError(
                f"kv_connector {self.name!r} of the module {config.kv_connector_module_path!r} cannot be made: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._max_writing = MAX_WAITING_PER_THREAD * kind.num_threads
        options = (kind.num_threads, content_bytes, patience_seconds)
        try:
            self._readers, self._writers = pair(
                lambda: Workers("kv-store-read", *options), lambda: Workers("kv-store-write", *options)
            )
        except OutOfMemoryError:
            self._close_store()
            raise

    # See SlotStore

    def find(self, names: Sequence[bytes]) -> Collection[bytes]:
        if not self._reads or not names or self._is_paused or (prefix := self._known_prefix()) is None:
            return ()
        keys = {_key(prefix, name): name for name in names}
        begun = time.monotonic()
        try:
            found = [keys[key] for key in self._store.find(list(keys))]
        except Exception as error:  # whatever the class raises
            self.note_failure("find", error)
            return ()
        if (seconds := time.monotonic() - begun) > SLOW_FIND_SECONDS:
            warn_once(f"{self.name}.find holds steps up ({seconds:.2g} s); it should answer from memory")
        return found

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        return ()

    def lends(self, names: Sequence[bytes]) -> Collection[bytes]:
        return ()

    def give_back(self, slot: int) -> None:
        """It lends nothing."""

    def seconds(self, num_blocks: int) -> float:
        return self._pace.seconds(num_blocks)

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        self._begin(Read, self._readers, number, names, slots)

    def is_opening(self) -> bool:
        return not self._is_paused and self._known_prefix() is None

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        self._writers.give_up()
        if not self._takes_writes():
            self._refused = number if self._refused is None else self._refused
            return False
        with self._lock:
            self._num_writing += len(names)
        self._begin(Write, self._writers, number, names, slots)
        return True

    def _takes_writes(self) -> bool:
        return not self._is_paused and self._num_writing < self._max_writing and self._known_prefix() is not None

    def _begin(
        self, kind: type[Read] | type[Write], workers: Workers, number: int, names: Sequence[bytes], slots: Sequence[int]
    ) -> None:
        prefix, transfer = self._prefix or "", PendingTransfer(number, len(names))
        for index, (name, slot) in enumerate(zip(names, slots, strict=True)):
            workers.submit(kind(self, transfer, index, _key(prefix, name), slot))

    def finished(self) -> list[Transfer]:
        self._readers.give_up()
        self._writers.give_up()
        if self._refused is not None and self._takes_writes():
            self._over.append(Transfer(self._refused, (), 0.0))
            self._refused = None
        return [self._over.popleft() for _ in range(len(self._over))]

    def discard(self, names: Sequence[bytes]) -> None:
        if names and (prefix := self._prefix) is not None:
            keys = [_key(prefix, name) for name in names]
            self._writers.submit(OtherCall(self, "discard", partial(self._store.discard, keys)))

    def reset(self, *, external: bool) -> None:
        with self._lock:
            self._num_resets += 1
            self._prefix = self._finding = None
        if external:
            self._writers.submit(OtherCall(self, "clear", self._store.clear))

    def add_stats(self, stats: SchedulerStats) -> None:
        """See SlotStore."""
        with self._lock:
            stats.own_store_read_bytes += self._num_read * self._memory.block_bytes
            stats.own_store_written_bytes += self._num_written * self._memory.block_bytes
            stats.own_store_read_seconds += self._read_seconds
            stats.own_store_write_seconds += self._write_seconds
            stats.own_store_failures = tuple(self._failures[call] for call in STORE_CALLS)

    def close(self) -> None:
        self._is_closed = True
        self._readers.close(CLOSE_SECONDS)
        self._writers.close(CLOSE_SECONDS)
        self._close_store()

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception as error:  # whatever the class raises
            logger.warning("close of %s failed", self.name, exc_info=error)

    # In threads

    def read_content(self, key: str, buffer: memoryview) -> bool:
        """Have the store fill a buffer. Returns whether it has the content; raises whatever it raises, or ValueError."""
        if self._is_paused:
            return False
        found: Any = self._store.read(key, buffer)
        if not isinstance(found, bool):
            raise ValueError(f"it returned {type(found).__name__}, not True or False")
        if found and buffer[:DIGEST_BYTES] != _digest(key):
            raise ValueError("the content is of another key")
        return found

    def fill_slot(self, slot: int, content: memoryview) -> None:
        """Copy a content to a slot."""
        sums = self._memory.sums[slot]
        sums[:] = np.frombuffer(content[DIGEST_BYTES : self._start], np.uint32).reshape(sums.shape)
        copy(content[self._start :], to=self._memory.view(slot))

    def copy_slot(self, slot: int, key: str, content: memoryview) -> None:
        """Copy a slot to a content."""
        content[:DIGEST_BYTES] = _digest(key)
        content[DIGEST_BYTES : self._start] = self._memory.sums[slot].tobytes()
        copy(self._memory.view(slot), to=content[self._start :])

    def write_content(self, key: str, content: memoryview) -> bool:
        """Have the store keep a content. Returns whether it was asked to; raises whatever it raises."""
        if self._is_paused:
            return False
        self._store.write(key, content.toreadonly())
        return True

    def end_content(self, task: ContentCall, error: Exception | None, seconds: float) -> None:
        """A content is over."""
        if error is not None:
            self.note_failure(task.what, error, is_hanging=not task.has_returned)
        is_right = error is None and task.is_right
        with self._lock:
            if is_right:
                self._num_failed = 0
            if isinstance(task, Write):
                self._num_writing -= 1
                self._num_written += is_right
                self._write_seconds += seconds
            else:
                self._num_read += is_right
                self._read_seconds += seconds
                if is_right:
                    self._pace.note(seconds / self._readers.num_threads)
            if (over := task.transfer.end(task.index, is_right)) is not None:
                self._over.append(over)
        if over is not None:
            self._wake()

    def note_failure(self, what: str, error: Exception, *, is_hanging: bool = False) -> None:
        """A call of the store failed. One that does not return counts as many."""
        if self._is_closed or isinstance(error, CancelledError):
            return  # it never began, because others do not return or the engine ends
        with self._lock:
            self._failures[what] += 1
            is_new, self._told = what not in self._told, self._told | {what}
            self._num_failed += MAX_FAILURES if is_hanging else 1
            begins_pause = self._num_failed >= MAX_FAILURES and not self._is_paused
            if begins_pause:
                # The first call after the pause that fails begins the next.
                self._num_failed, self._paused_until = MAX_FAILURES - 1, time.monotonic() + PAUSE_SECONDS
        if is_new:
            logger.warning("%s of %s failed; what it was to bring is computed", what, self.name, exc_info=error)
        if begins_pause:
            reason = f"{type(error).__name__}: {error}"
            logger.error("%s failed again and again, or does not answer (%s: %s); it is not used for %g s",
                         self.name, what, reason, PAUSE_SECONDS)  # fmt: skip

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until or self._readers.is_stuck or self._writers.is_stuck

    def _known_prefix(self) -> str | None:
        """The beginning of keys; None while weights are looked at."""
        with self._lock:
            if self._prefix is None and (self._finding is None or self._finding.is_over):
                self._finding = OtherCall(self, "the fingerprint", partial(self._find_prefix, self._num_resets))
                self._writers.submit(self._finding)
            return self._prefix

    def _find_prefix(self, num_resets: int) -> None:
        prefix = _prefix_of(self._describe())
        with self._lock:
            if num_resets == self._num_resets:
                self._prefix = prefix


def _prefix_of(described: dict[str, Any]) -> str:
    return digest(described).hex()[:32]


def _key(prefix: str, name: bytes) -> str:
    return f"{prefix}-{name.hex()}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
