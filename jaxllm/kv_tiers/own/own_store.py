"""Copies contents between slots of host memory and a store of one's own, whose failures cost no request."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv_connectors import KVTransferConfig
from jaxllm.kv_tiers.kv_store import KVStore, StoreContext
from jaxllm.kv_tiers.own.transfers import PendingTransfer, TransferThreads
from jaxllm.kv_tiers.slot_store import SlotMemory, Transfer
from jaxllm.log import logger, warn_once
from jaxllm.scheduler_stats import SchedulerStats

MAX_FAILURES = 8
"""After so many in a row the store is left alone for a while."""
PAUSE_SECONDS = 60.0
PATIENCE_SECONDS = 10.0
"""A call that takes longer is not waited for."""
CLOSE_SECONDS = 5.0
"""How long the end of an engine waits for calls of the store."""
MAX_WAITING_PER_THREAD = 16
"""If so many contents wait to be written, no more are taken."""
SLOW_FIND_SECONDS = 0.05
_FIRST_RATE = 1e9
"""Bytes read in a second, before the first read."""
_NEW_SHARE = 0.1
"""Weight of a new observation in the average."""
_DIGEST_BYTES = 32


class OwnStore:
    """A `SlotStore` over a `KVStore`. A content has the digest of its key and the checksums of the devices before the block, so that one
    that the store mixed up or damaged is noticed. The store gets the buffer of a thread, never a slot."""

    def __init__(
        self,
        kind: type[KVStore],
        config: KVTransferConfig,
        memory: SlotMemory,
        fingerprint: bytes,
        wake: Callable[[], None],
        patience_seconds: float = PATIENCE_SECONDS,
    ):
        """fingerprint: of the model, its weights and the layout of contents. wake: see SlotStore. Raises ConfigError if the class cannot
        make a store."""
        self.name = kind.__name__
        self.writes = config.kv_role != "kv_consumer"
        self._reads = config.kv_role != "kv_producer"
        self._memory, self._fingerprint = memory, fingerprint
        self._start = _DIGEST_BYTES + memory.sums[0].nbytes
        """Bytes before the block."""
        self._prefix = self._new_prefix(b"")
        self._block_seconds = memory.block_bytes / _FIRST_RATE
        self._num_reading: dict[int, int] = {}
        """Contents of the reads under way."""
        self._lock = threading.Lock()
        self._num_failed = 0
        """Failures since the last call that did not fail."""
        self._paused_until = 0.0
        self._told: set[str] = set()
        """Methods whose failure was logged."""
        self._buffers = threading.local()
        try:
            self._store = kind(StoreContext(config, self._start + memory.block_bytes))
        except Exception as error:  # whatever the class raises
            raise ConfigError(
                f"kv_connector {self.name!r} of the module {config.kv_connector_module_path!r} cannot be made: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._max_waiting = MAX_WAITING_PER_THREAD * kind.num_threads
        self._threads = TransferThreads(kind.num_threads, patience_seconds, wake)

    def _new_prefix(self, epoch: bytes) -> str:
        return hashlib.sha256(self._fingerprint + epoch).hexdigest()[:32]

    def _key(self, name: bytes) -> str:
        return f"{self._prefix}-{name.hex()}"

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    # See SlotStore

    def find(self, names: Sequence[bytes]) -> Collection[bytes]:
        if not self._reads or not names or self._is_paused:
            return ()
        keys = {self._key(name): name for name in names}
        begun = time.monotonic()
        try:
            found = [keys[key] for key in self._store.find(list(keys))]
        except Exception as error:  # whatever the class raises
            self._note_failure("find", error)
            return ()
        if (seconds := time.monotonic() - begun) > SLOW_FIND_SECONDS:
            warn_once(f"{self.name}.find holds steps up ({seconds:.2g} s); it should answer from memory")
        return found

    def seconds(self, num_blocks: int) -> float:
        return num_blocks * self._block_seconds

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        self._num_reading[number] = len(names)
        copy = partial(self._read, [self._key(name) for name in names], list(slots))
        self._threads.begin(number, len(names), copy, is_urgent=True)

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        if self._is_paused or self._threads.num_waiting >= self._max_waiting:
            return False
        copy = partial(self._write, [self._key(name) for name in names], list(slots))
        self._threads.begin(number, len(names), copy, is_urgent=False)
        return True

    def finished(self) -> list[Transfer]:
        found, num_given_up = self._threads.finished()
        if num_given_up:
            self._note_failure("a transfer", TimeoutError("it took too long"), MAX_FAILURES)
        for transfer in found:
            if (num_blocks := self._num_reading.pop(transfer.number, None)) is not None:
                self._block_seconds += _NEW_SHARE * (transfer.seconds / num_blocks - self._block_seconds)
        return found

    def discard(self, names: Sequence[bytes]) -> None:
        if names:
            self._threads.do(partial(self._call, "discard", self._store.discard, [self._key(name) for name in names]))

    def reset(self, *, external: bool) -> None:
        # What was written before, by any engine, has other keys.
        self._prefix = self._new_prefix(os.urandom(16))
        if external:
            self._threads.do(partial(self._call, "clear", self._store.clear))

    def add_stats(self, stats: SchedulerStats) -> None:
        """Transfers are counted where they begin."""

    def close(self) -> None:
        if self._threads.close(CLOSE_SECONDS):
            self._call("close", self._store.close)
        else:
            logger.warning("%s did not return from a call within %g s; it is left without close()", self.name, CLOSE_SECONDS)

    # In threads

    def _read(self, keys: Sequence[str], slots: Sequence[int], transfer: PendingTransfer, index: int) -> bool:
        if transfer.is_given_up or self._is_paused:
            return False
        buffer, key = self._buffer(), keys[index]
        buffer[:_DIGEST_BYTES] = 0
        found = self._call("read", self._store.read, key, buffer.data)
        if found is False or found is _FAILED:
            return False
        if found is not True:
            self._note_failure("read", TypeError(f"it returned {type(found).__name__}, not True or False"))
            return False
        if bytes(buffer[:_DIGEST_BYTES]) != _digest(key):
            self._note_failure("read", ValueError("the content is of another key"))
            return False
        self._note_success()
        with transfer.lock:
            if transfer.is_given_up:
                return False
            sums = self._memory.sums[slots[index]]
            sums[:] = buffer[_DIGEST_BYTES : self._start].view(np.uint32).reshape(sums.shape)
            np.frombuffer(self._memory.view(slots[index]), np.uint8)[:] = buffer[self._start :]
        return True

    def _write(self, keys: Sequence[str], slots: Sequence[int], transfer: PendingTransfer, index: int) -> bool:
        buffer, key = self._buffer(), keys[index]
        with transfer.lock:
            if transfer.is_given_up or self._is_paused:
                return False
            buffer[_DIGEST_BYTES : self._start] = self._memory.sums[slots[index]].reshape(-1).view(np.uint8)
            buffer[self._start :] = np.frombuffer(self._memory.view(slots[index]), np.uint8)
        buffer[:_DIGEST_BYTES] = np.frombuffer(_digest(key), np.uint8)
        if self._call("write", self._store.write, key, buffer.data.toreadonly()) is _FAILED:
            return False
        self._note_success()
        return True

    def _buffer(self) -> np.ndarray:
        """The buffer of this thread for a content."""
        if not hasattr(self._buffers, "own"):
            self._buffers.own = np.zeros(self._start + self._memory.block_bytes, np.uint8)
        return self._buffers.own  # type: ignore[no-any-return]

    def _call(self, what: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """What a method of the store returns, or _FAILED."""
        try:
            return method(*arguments)
        except (Exception, SystemExit) as error:  # whatever the class raises
            self._note_failure(what, error)
            return _FAILED

    def _note_success(self) -> None:
        with self._lock:
            self._num_failed = 0

    def _note_failure(self, what: str, error: BaseException, count: int = 1) -> None:
        with self._lock:
            is_new, self._told = what not in self._told, self._told | {what}
            self._num_failed += count
            begins_pause = self._num_failed >= MAX_FAILURES and not self._is_paused
            if begins_pause:
                # The first call after the pause that fails begins the next.
                self._num_failed, self._paused_until = MAX_FAILURES - 1, time.monotonic() + PAUSE_SECONDS
        if is_new:
            logger.warning("%s of %s failed; what it had is computed again", what, self.name, exc_info=error)
        if begins_pause:
            logger.error(
                "%s fails again and again (%s of it: %s: %s); it is not used for %g s",
                self.name, what, type(error).__name__, error, PAUSE_SECONDS,
            )  # fmt: skip


_FAILED = object()
"""Stands for the result of a call that failed."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
