"""Copies between rows of a staging buffer and slots of host memory, by CUDA's runtime on streams of their own.

Copies of JAX allocate from its memory pool, and one to a device waits for the programs that were started before. These write into the
memory of an existing array, which JAX takes for constant: the caller sees to it that no program uses it.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from jaxllm.cache_spec import WORD_BYTES
from jaxllm.errors import ConfigError
from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies.arena import PAGE_BYTES, Arena, Region, place
from jaxllm.runner.features.block_copies.block_writer import BlockWriter
from jaxllm.runner.features.block_copies.cuda_libraries import CudaError, Runtime
from jaxllm.runner.features.block_copies.transfer import Addresses, Loading, Waiting, by_device

_REGISTERED_BYTES = 64 << 30
"""Most memory that is page-locked by one call. No copy reaches from one such piece into the next: CUDA need not accept that."""
_LENT_BYTES = 64 << 20
"""As much of another process's memory: steps and copies go on meanwhile, and wait for each call."""
_LENT_SHARE = 0.2
"""Largest part of the time that such calls take. Without pauses between them one begins as soon as another ends, and steps wait for all."""
_MAX_TRIED_BYTES = 1 << 30
"""A larger limit of locked memory is not tried: that would take long."""
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly: devices only read it, and the process may not write it either."""
_NON_BLOCKING = 1
"""cudaStreamNonBlocking: does not wait for the default stream."""
_OTHER_CLIENT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
_ANY_DIRECTION = 4
"""cudaMemcpyDefault"""


class CudaTransfer:
    """A Transfer between the memory of staging buffers and page-locked slots."""

    def __init__(self, arena: Arena, format: BlockFormat, ordinals: Sequence[int], *, max_rows: int, num_loads: int):
        """Locks the arena's pages, and makes the streams of these devices. max_rows: of a load. num_loads: under way at a time. Raises
        ConfigError if the memory cannot be locked."""
        self._format, self._base, self._slot_bytes = format, arena.address, arena.slot_bytes
        self._runtime = Runtime()
        self._piece_slots, self._lent_slots = (max(1, size // arena.slot_bytes) for size in (_REGISTERED_BYTES, _LENT_BYTES))
        self._ordinals = ordinals
        self._registered: list[int] = []
        self._bases = {0: self._base}
        """Address of the first slot of each region."""
        self._registered_of: dict[int, list[int]] = {}
        """Addresses of the locked pieces of lent regions."""
        self._streams: dict[tuple[str, int], ctypes.c_void_p] = {}
        """By direction and device."""
        self._writers: dict[int, BlockWriter] = {}
        """By device."""
        self._page = ctypes.c_void_p()
        """A page of the device that regions are tried with. It is taken at the start: later a device may have no memory left."""
        self._runtime.call("cudaSetDevice", ordinals[0])
        try:
            for start, size in self._pieces(self._base, arena.num_slots, self._piece_slots):
                self._register(start, size, _PORTABLE, self._registered)
        except CudaError as error:
            self.close()
            raise _cannot_lock(arena.num_bytes, error) from error
        try:
            for ordinal in ordinals:
                self._runtime.call("cudaSetDevice", ordinal)
                for direction in ("out", "in"):
                    stream = ctypes.c_void_p()
                    self._runtime.call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
                    self._streams[direction, ordinal] = stream
                self._writers[ordinal] = BlockWriter(self._runtime, format, ordinal, max_rows, num_loads)
            if len(ordinals) == 1:
                self._runtime.call("cudaMalloc", ctypes.byref(self._page), ctypes.c_size_t(PAGE_BYTES))
        except (CudaError, ConfigError):
            self.close()
            raise

    def _pieces(self, address: int, num_slots: int, most: int) -> Iterator[tuple[int, int]]:
        """The addresses and sizes of pieces of at most so many slots."""
        for first in range(0, num_slots, most):
            yield address + first * self._slot_bytes, min(most, num_slots - first) * self._slot_bytes

    def _register(self, start: int, size: int, flags: int, registered: list[int]) -> None:
        """Lock a piece, whose address is added to `registered`."""
        self._runtime.call("cudaHostRegister", _at(start), ctypes.c_size_t(size), flags)
        registered.append(start)

    def add_region(self, number: int, region: Region, stop: threading.Event) -> None:
        if len(self._ordinals) > 1:
            # A call that locks memory may wait for a device's step, which waits for that of another device, not launched yet.
            raise CudaError("devices that share the engine's layers may not wait while the memory is locked")
        self._runtime.call("cudaSetDevice", self._ordinals[0])
        registered = self._registered_of.setdefault(number, [])
        try:
            for start, size in self._pieces(region.address, len(region.words), self._lent_slots):
                began = time.perf_counter()
                self._register(start, size, _PORTABLE | _READ_ONLY, registered)
                if stop.wait((time.perf_counter() - began) * (1 / _LENT_SHARE - 1)):
                    raise CudaError("the memory is not needed any more")
            self._try(region.address, self._ordinals[0])
        except CudaError:
            self.remove_region(number)
            raise
        self._bases[number] = region.address

    def _try(self, address: int, ordinal: int) -> None:
        """Copy a page to a device. A copy that fails later would fail a step. Raises CudaError."""
        size, one, stream = ctypes.c_size_t(PAGE_BYTES), ctypes.c_size_t(1), self._streams["in", ordinal]
        try:
            self._runtime.begin("cudaMemcpy2DAsync", self._page, size, _at(address), size, size, one, _ANY_DIRECTION, stream)
        finally:
            self._runtime.call("cudaStreamSynchronize", stream)

    def remove_region(self, number: int) -> None:
        self._bases.pop(number, None)
        self._unlock(self._registered_of.pop(number, []))

    def _unlock(self, registered: list[int]) -> None:
        """As far as a device that is lost allows it."""
        for address in registered:
            with contextlib.suppress(CudaError):
                self._runtime.call("cudaHostUnregister", _at(address))
        registered.clear()

    def _address(self, slot: int) -> int:
        region, index = place(slot)
        return self._bases[region] + index * self._slot_bytes

    def to_host(self, staging: jax.Array, slots: Sequence[int]) -> Waiting:
        spans = self._begin("out", staging, slots)
        return lambda: (staging, _wait_for(spans))

    def addresses(self, caches: Sequence[jax.Array]) -> Addresses:
        """Where these arrays are. Does not wait for the programs that compute them."""
        if len(self._ordinals) == 1:
            return {self._ordinals[0]: tuple(array.unsafe_buffer_pointer() for array in caches)}
        found: dict[int, list[int]] = {ordinal: [] for ordinal in self._ordinals}
        for array in caches:
            for index in range(len(self._ordinals)):
                part = array.addressable_data(index)
                found[part.device.local_hardware_id].append(part.unsafe_buffer_pointer())  # type: ignore[union-attr]
        return {ordinal: tuple(addresses) for ordinal, addresses in found.items()}

    def load(
        self,
        number: int,
        staging: jax.Array,
        slots: Sequence[int],
        block_ids: Sequence[int],
        sums_DnH: np.ndarray,
        addresses: Addresses,
        *,
        is_alone: bool,
    ) -> Loading:
        """Begin to copy slots into blocks, through a staging buffer. No step uses the blocks until what is returned has been waited for,
        and nothing the buffer.

        number: of the load's place among those under way. sums_DnH: uint32, the checksums that each device's parts should have; others are
        not written. addresses: of the caches. is_alone: whether no steps run. Else this returns once the copy is over, so that no other
        is queued behind it: what steps send to the devices would wait for both. Raises CudaError, and then nothing is under way.
        """
        spans = self._begin("in", staging, slots)
        verdicts: list[Callable[[], np.ndarray]] = []
        try:
            for span, (device, part) in zip(spans, by_device(staging), strict=True):
                self._runtime.begin("cudaSetDevice", span.ordinal)
                writer, rows, to = self._writers[span.ordinal], part.unsafe_buffer_pointer(), addresses[span.ordinal]
                verdicts.append(writer.begin(number, rows, span.last_event, block_ids, sums_DnH[device], to))
        except BaseException:
            with contextlib.suppress(CudaError):
                _wait_for(spans)
            self._wait_for_writers()
            raise
        copied = partial(_wait_for, spans)
        wait = partial(self._written, staging, verdicts)
        if is_alone:
            return lambda: wait(copied)
        try:
            seconds = copied()
        except BaseException:
            self._wait_for_writers()
            raise
        return lambda: wait(lambda: seconds)

    def _written(
        self, staging: jax.Array, verdicts: Sequence[Callable[[], np.ndarray]], copied: Callable[[], float]
    ) -> tuple[np.ndarray, float]:
        """See `load`. staging: it stays as long as it is used."""
        try:
            seconds = copied()
            return np.all([wait() for wait in verdicts], axis=0), seconds
        except BaseException:
            self._wait_for_writers()
            raise

    def _wait_for_writers(self) -> None:
        """Wait for all that they have begun, after an error: blocks and buffers get other contents next."""
        for writer in self._writers.values():
            with contextlib.suppress(CudaError):
                writer.synchronize()

    def _begin(self, direction: str, staging: jax.Array, slots: Sequence[int]) -> list["_Span"]:
        """Begin a copy on each device."""
        is_out, num_copies = direction == "out", self._format.num_copies
        row_bytes = self._format.part_words * WORD_BYTES
        spans = []
        try:
            for device, part in by_device(staging):
                if is_out and device % num_copies:
                    continue  # another device has the same
                ordinal = part.device.local_hardware_id  # type: ignore[union-attr]
                self._runtime.begin("cudaSetDevice", ordinal)  # of this thread
                stream = self._streams[direction, ordinal]
                spans.append(_Span(self._runtime, ordinal, stream))
                rows, offset = part.unsafe_buffer_pointer(), device // num_copies * row_bytes
                for row, slot, count in runs(slots, self._piece_slots, self._lent_slots):
                    of_rows = (_at(rows + row * row_bytes), ctypes.c_size_t(row_bytes))
                    of_slots = (_at(self._address(slot) + offset), ctypes.c_size_t(self._slot_bytes))
                    to, source = (of_slots, of_rows) if is_out else (of_rows, of_slots)
                    shape = (ctypes.c_size_t(row_bytes), ctypes.c_size_t(count))
                    self._runtime.begin("cudaMemcpy2DAsync", *to, *source, *shape, _ANY_DIRECTION, stream)
                spans[-1].end()
        except BaseException:
            with contextlib.suppress(CudaError):
                _wait_for(spans)
            raise
        return spans

    def close(self) -> None:
        """Unlock the pages, and give back what devices have."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        if self._page:
            with contextlib.suppress(CudaError):
                self._runtime.call("cudaFree", self._page)
            self._page = ctypes.c_void_p()
        for registered in (self._registered, *self._registered_of.values()):
            self._unlock(registered)
        for stream in self._streams.values():
            with contextlib.suppress(CudaError):
                self._runtime.call("cudaStreamDestroy", stream)
        self._streams.clear()


class _Span:
    """Two events of a stream, at the beginning and the end of a copy."""

    def __init__(self, runtime: Runtime, ordinal: int, stream: ctypes.c_void_p):
        """ordinal: of the thread's device, which has the stream."""
        self._runtime, self.ordinal, self._stream = runtime, ordinal, stream
        self._events: list[ctypes.c_void_p] = []
        self._record()

    @property
    def last_event(self) -> ctypes.c_void_p:
        """After `end`: that of the copy's end."""
        return self._events[-1]

    def _record(self) -> None:
        event = ctypes.c_void_p()
        self._runtime.begin("cudaEventCreate", ctypes.byref(event))
        self._events.append(event)
        self._runtime.begin("cudaEventRecord", event, self._stream)

    def end(self) -> None:
        """Whatever is begun from now on is another copy's."""
        self._record()

    def wait(self) -> float:
        """Return its seconds when it is over, or if it never ended when all that the stream had to do is."""
        milliseconds = ctypes.c_float()
        self._runtime.begin("cudaSetDevice", self.ordinal)
        try:
            if len(self._events) < 2:
                self._runtime.call("cudaStreamSynchronize", self._stream)
            else:
                self._runtime.call("cudaEventSynchronize", self._events[1])
                self._runtime.begin("cudaEventElapsedTime", ctypes.byref(milliseconds), *self._events)
        finally:
            for event in self._events:
                with contextlib.suppress(CudaError):
                    self._runtime.begin("cudaEventDestroy", event)
        return milliseconds.value / 1e3


def _wait_for(spans: Iterable[_Span]) -> float:
    """The seconds of the longest. Waits for all, after an error too: others may get the buffers and slots next."""
    seconds, errors = [0.0], list[CudaError]()
    for span in spans:
        try:
            seconds.append(span.wait())
        except CudaError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return max(seconds)


def check_client() -> None:
    """Raise ConfigError if JAX is to use the client of XLA that runs everything on one stream of a device: these copies were checked with
    its default client alone."""
    if os.environ.get(_OTHER_CLIENT, "0") != "0":
        raise ConfigError(
            f"{_OTHER_CLIENT} is set, and blocks are not copied to host memory with that client of XLA; unset it, or leave "
            "kv_offloading_size out"
        )


def check_locking(num_bytes: int, ordinal: int) -> None:
    """Raise ConfigError if so much memory cannot be locked, as far as a small piece tells. On some systems CUDA keeps to the process's
    limit of locked memory, on others not, so a page more than that is tried."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    num_pages = 1 + (limit // PAGE_BYTES if 0 <= limit < min(num_bytes, _MAX_TRIED_BYTES) else 0)
    memory = np.frombuffer(mmap.mmap(-1, num_pages * PAGE_BYTES), np.uint8)
    runtime, address = Runtime(), _at(memory.ctypes.data)
    runtime.call("cudaSetDevice", ordinal)
    try:
        runtime.call("cudaHostRegister", address, ctypes.c_size_t(memory.nbytes), _PORTABLE)
    except CudaError as error:
        raise _cannot_lock(num_bytes, error) from error
    runtime.call("cudaHostUnregister", address)


def _cannot_lock(num_bytes: int, error: CudaError) -> ConfigError:
    return ConfigError(
        f"kv_offloading_size is {num_bytes / 2**30:.3g} GiB, and CUDA cannot lock so much memory ({error}); lower it, or "
        "allow more (ulimit -l, docker's --ulimit memlock=-1)"
    )


def runs(slots: Sequence[int], piece: int, lent_piece: int) -> Iterator[tuple[int, int, int]]:
    """(row, slot, count) of runs of consecutive slots: each is one copy. None reaches from one region, or one piece of so many slots, into
    the next."""

    first = 0
    for row in range(1, len(slots) + 1):
        if row < len(slots) and (slot := slots[row]) == slots[row - 1] + 1:
            region, index = place(slot)
            if index % (lent_piece if region else piece):
                continue
        yield first, slots[first], row - first
        first = row


def _at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)
