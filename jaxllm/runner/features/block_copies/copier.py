"""Runs copies between blocks and host memory: programs in the order of steps, all else in threads meanwhile."""

import contextlib
import functools
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.device_errors import is_out_of_memory
from jaxllm.device_ops import CopyBlocks, DeviceOp, FinishedCopy, GatherBlocks, LoadBlocks
from jaxllm.errors import EngineDeadError, OutOfMemoryError
from jaxllm.parallel.arrays import delete
from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies import programs
from jaxllm.runner.features.block_copies.arena import REGION_BITS, Arena, place
from jaxllm.runner.features.block_copies.cuda import CudaTransfer, check_client, check_locking
from jaxllm.runner.features.block_copies.programs import Gather, Scatter, batch_sizes
from jaxllm.runner.features.block_copies.short_turns import SHORT_TURNS
from jaxllm.runner.features.block_copies.transfer import Addresses, Loading, PlainTransfer, Transfer, Waiting
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.worker_thread import WorkerThread

if TYPE_CHECKING:
    from jaxllm.runner.batch import Batch

Finish = Callable[[], FinishedCopy]

LOAD_BUFFERS = 2
"""Staging buffers of loads: one is filled while the other is written to its blocks."""


class BlockCopier(OpRunner):
    """The slots of a runner's blocks in host memory, and the way between.

    A store is a program in the order of steps, which gathers blocks in a staging buffer, and a transfer behind it. A load on GPUs is a
    transfer to a staging buffer and kernels that write it to its blocks, on streams of their own: it waits for the steps that were
    dispatched before it, and none waits for it. On CPUs a program in the order of steps writes the blocks.
    """

    ops: tuple[type[DeviceOp], ...] = (GatherBlocks, LoadBlocks)

    def __init__(self, runner: Any, format: BlockFormat, arena_bytes: int, num_buffers: int, *, is_shared: bool = False):
        """Takes no memory. num_buffers: staging buffers of loads and stores. Raises ConfigError if a block does not fit into the arena."""
        self._runner, self.format = runner, format
        self.arena = Arena(arena_bytes, format, is_shared=is_shared)
        self.sizes = batch_sizes(format)
        self.num_staging = num_buffers - LOAD_BUFFERS
        self._staging: list[jax.Array] = []
        """The staging buffers of stores, and behind them those of loads."""
        self._free_loads: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Numbers of the buffers of loads that are free."""
        self._loads: dict[int, _LoadState] = {}
        """On GPUs the loads that are not over, by number."""
        self._planned: list[LoadBlocks] = []
        """Loads of the plan that is being dispatched."""
        self._is_alone = True
        """Whether the latest plan has no step. Only then a copy is queued while the one before it runs: what steps send to the devices and
        back would wait for both."""
        self._mark: Callable[[], jax.Array] | None = None
        """Starts a program whose result is there once all that were started before are done."""
        self._finished: list[FinishedCopy] = []
        self._num_under_way = 0
        """Copies that began and that `finished` did not return."""
        self._changed = threading.Condition()
        self._is_woken = False
        self._transfer: Transfer | None = None
        """None, as the threads, before the first `allocate`: engines try runners that never run."""
        self._opening: Future[Transfer] | None = None
        """The transfer, once it has its memory."""
        self._threads: tuple[WorkerThread, ...] = ()
        """For stores, loads, the ends of loads, and those of stores."""

    @property
    def num_slots(self) -> int:
        return self.arena.num_slots

    @property
    def max_blocks(self) -> int:
        """Most blocks of a copy."""
        return self.sizes[-1]

    @property
    def block_bytes(self) -> int:
        return self.format.block_bytes

    # Results, for who had plans carry the operations

    def finished(self) -> list[FinishedCopy]:
        """The copies that are over since the last call. Raises EngineDeadError if a thread ended, whose copies will never be over."""
        if not self._num_under_way:
            return []
        if dead := [thread.name for thread in self._threads if not thread.is_alive]:
            raise EngineDeadError(f"the thread {dead[0]}, which copies blocks to and from host memory, has ended")
        with self._changed:
            found, self._finished = self._finished, []
        self._num_under_way -= len(found)
        return found

    def wait(self, seconds: float) -> None:
        """Return when a copy is over that `finished` did not return, after `wake`, or after this time."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished) or self._is_woken, seconds)
            self._is_woken = False

    def wake(self) -> None:
        """Have `wait` return, or the next one at once. Any thread may call it."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """See Copies. On CPUs programs write blocks in the order of steps, so nothing needs to end first."""
        with self._changed:
            state = self._loads.get(number)
            if state is not None:
                state.is_cancelled = True
                self._changed.wait_for(lambda: not state.is_copying)

    def _finish(self, op: CopyBlocks, finish: Finish) -> None:
        try:
            found = finish()
        except BaseException as error:  # whatever it is: the step loop waits for this copy
            found = FinishedCopy(op.number, error=error if isinstance(error, Exception) else RuntimeError(repr(error)))
        with self._changed:
            self._finished.append(found)
            self._changed.notify_all()

    # Operations

    def run(self, op: CopyBlocks) -> None:
        """See OpRunner."""
        match op:
            case GatherBlocks():
                size = self._size(len(op.block_ids))
                program = self._runner.program(ProgramKey(Gather.name, size))
                staging, sums = programs.gather(self._runner, program, size, op.block_ids, self._staging[op.staging])
                self._staging[op.staging] = staging
                self._num_under_way += 1
                self._threads[0].submit(partial(self._store, op, staging, sums))
            case LoadBlocks():
                self._planned.append(op)
                if isinstance(self._transfer, CudaTransfer):
                    self._loads[op.number] = _LoadState()
                self._num_under_way += 1

    def before_step(self, batches: Sequence["Batch"]) -> None:
        """See OpRunner. Starts the loads of the plan, behind all else that reads or writes blocks before its step."""
        self._is_alone = not batches
        if self._planned and isinstance(self._transfer, CudaTransfer):
            assert self._mark is not None
            mark, addresses = self._mark(), self._transfer.addresses(self._runner.caches)
            for op in self._planned:
                self._threads[1].submit(partial(self._begin_load, op, mark, addresses))
            self._planned.clear()
        while self._planned:
            self._load_in_order(self._planned[0])
            del self._planned[0]

    def replace_lost(self) -> None:
        """See OpRunner. Loads that a plan which failed has not started never will be."""
        for op in self._planned:
            self._loads.pop(op.number, None)
        self._num_under_way -= len(self._planned)
        self._planned.clear()

    def _size(self, num_blocks: int) -> int:
        return next(size for size in self.sizes if size >= num_blocks)

    def _store(self, op: GatherBlocks, staging: jax.Array, sums: jax.Array) -> None:
        """Begin a copy to host memory once its program is over. If no steps run, another thread waits for its end."""
        try:
            finish = self._to_host(op, staging, sums)
        except BaseException as error:
            finish = partial(_fail, error)
        end = partial(self._finish, op, finish)
        if self._is_alone:
            self._threads[3].submit(end)
        else:
            end()

    def _to_host(self, op: GatherBlocks, staging: jax.Array, sums: jax.Array) -> Finish:
        assert self._transfer is not None
        sums.copy_to_host_async()  # not behind the blocks
        sums.block_until_ready()  # the program is over
        return partial(self._stored, op, self._transfer.to_host(staging, op.slots), sums)

    def _stored(self, op: GatherBlocks, wait: Waiting, sums: jax.Array) -> FinishedCopy:
        _, seconds = wait()
        sums_DnH = np.asarray(sums)
        self.arena.sums[op.slots] = sums_DnH[:: self.format.num_copies, : len(op.slots)].swapaxes(0, 1)
        return FinishedCopy(op.number, seconds=seconds)

    # Loads

    def _load_in_order(self, op: LoadBlocks) -> None:
        """Copy slots to the devices, and start the program that writes their blocks."""
        assert isinstance(self._transfer, PlainTransfer)
        try:
            sums_DnH = self._sums(op)
            rows, seconds = self._transfer.to_device(self._staging[-1], op.slots)()
        except Exception as error:
            finish: Finish = partial(_fail, error)  # of this copy, not of the step with which it begins
        else:
            size = self._size(len(op.block_ids))
            program = self._runner.program(ProgramKey(Scatter.name, size))
            is_right_Dn = programs.scatter(self._runner, program, size, op.block_ids, rows, sums_DnH)
            finish = partial(self._verdict, op, lambda: (np.all(np.asarray(is_right_Dn), axis=0), seconds))
        self._threads[2].submit(partial(self._finish, op, finish))

    def _begin_load(self, op: LoadBlocks, mark: jax.Array, addresses: Addresses) -> None:
        """Begin a load once the steps before it are done and a staging buffer is free, unless it is cancelled first. Another thread waits
        for its end."""
        state, buffer = self._loads[op.number], None
        finish: Finish
        try:
            mark.block_until_ready()
            buffer = self._free_loads.get()
            with self._changed:
                state.is_copying = not state.is_cancelled
            if state.is_copying:
                finish = partial(self._verdict, op, self._load(op, buffer, addresses))
            else:
                finish = partial(FinishedCopy, op.number, [False] * len(op.slots))
                self._free_loads.put(buffer)
                buffer = None
        except BaseException as error:
            finish = partial(_fail, error)
        self._threads[2].submit(partial(self._end_load, op, finish, buffer))

    def _load(self, op: LoadBlocks, buffer: int, addresses: Addresses) -> Loading:
        assert isinstance(self._transfer, CudaTransfer)
        staging = self._staging[self.num_staging + buffer]
        return self._transfer.load(buffer, staging, op.slots, op.block_ids, self._sums(op), addresses, is_alone=self._is_alone)

    def _end_load(self, op: LoadBlocks, finish: Finish, buffer: int | None) -> None:
        self._finish(op, finish)
        if buffer is not None:
            self._free_loads.put(buffer)
        with self._changed:
            self._loads.pop(op.number).is_copying = False
            self._changed.notify_all()

    def _sums(self, op: LoadBlocks) -> np.ndarray:
        """uint32 [devices, n, H]: the checksums that contents should have."""
        return np.repeat(self.arena.sums_of(op.slots).swapaxes(0, 1), self.format.num_copies, axis=0)

    def _verdict(self, op: LoadBlocks, wait: Loading) -> FinishedCopy:
        is_right_n, seconds = wait()
        return FinishedCopy(op.number, list(map(bool, is_right_n[: len(op.block_ids)])), seconds)

    # Memory

    def begin(self) -> None:
        """See OpRunner. Takes host memory, for which large sizes need seconds. Raises ConfigError for what is wrong at first sight."""
        if self._is_on_gpus:
            check_client()
        self.arena.open()
        try:
            thread = WorkerThread("kv-memory")
            if self._is_on_gpus:
                thread.submit(partial(check_locking, self.arena.num_bytes, self._ordinals[0])).result()
        except BaseException:
            self.arena.close()
            raise
        self._opening = thread.submit(self._open)

    def take_over(self, other: "BlockCopier") -> None:
        """See OpRunner."""
        assert other.format == self.format
        self.arena, self._opening, other._opening = other.arena, other._opening, None

    def allocate(self) -> None:
        """See OpRunner. What is in the slots stays right. Raises OutOfMemoryError if devices have too little memory."""
        if self._transfer is None:
            if self._opening is None:
                self.begin()
            assert self._opening is not None
            with self._runner.times.part("host memory"):
                self._transfer = self._opening.result()
            SHORT_TURNS.begin()
            self._threads = tuple(map(WorkerThread, ("kv-store", "kv-load", "kv-loaded", "kv-stored")))
        try:
            for _ in range(self.num_staging + LOAD_BUFFERS):
                self._staging.append(self._new_staging())
            self._mark = self._new_mark()
        except Exception as error:
            delete(self._staging)
            self._staging = []
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"the device has no memory for {self.num_staging + LOAD_BUFFERS} buffers of {self._staging_bytes / 2**20:.3g} MiB, "
                f"through which blocks are copied to host memory and back ({_first_line(error)}); lower gpu_memory_utilization, or leave "
                "kv_offloading_size out"
            ) from error

        while not self._free_loads.empty():
            self._free_loads.get()
        for buffer in range(LOAD_BUFFERS):
            self._free_loads.put(buffer)

    def _new_mark(self) -> Callable[[], jax.Array]:
        """See `_mark`. Compiles it."""
        shape = programs.by_device(self._runner.shapes, 1)
        mark = partial(_next, _zeros(shape.shape, shape.dtype, shape.sharding)())
        jax.block_until_ready(mark())
        return mark

    def _new_staging(self) -> jax.Array:
        """A zeroed staging buffer, once the devices have it."""
        shape = Gather(self.format.num_copies).staging(self._runner.shapes)
        return jax.block_until_ready(_zeros(shape.shape, shape.dtype, shape.sharding)())

    @property
    def _staging_bytes(self) -> int:
        """Bytes of a staging buffer on each device."""
        return programs.staging_bytes(self.format)

    def _open(self) -> Transfer:
        """Take the memory of the arena, which is open."""
        try:
            if not self._is_on_gpus:
                return PlainTransfer(self.arena, self.format)
            self.arena.touch()
            if self.arena.is_closing:  # to lock what was not touched would take long
                raise EngineDeadError("the engine ends")
            return CudaTransfer(self.arena, self.format, self._ordinals, max_rows=self.max_blocks, num_loads=LOAD_BUFFERS)
        except BaseException:
            self.arena.close()
            raise

    # Slots that another process lends

    def add_region(self, memory: mmap.mmap, stop: threading.Event) -> int:
        """See Regions."""
        assert self._transfer is not None
        number = self.arena.add_region(memory)
        try:
            self._transfer.add_region(number, self.arena.regions[number], stop)
        except RuntimeError:
            del self.arena.regions[number]
            raise
        return number

    def remove_region(self, number: int) -> None:
        """See Regions."""
        self._drain()
        if self._transfer is not None:
            self._transfer.remove_region(number)
        del self.arena.regions[number]

    def slot(self, region: int, index: int, sums: np.ndarray) -> int | None:
        """See Regions."""
        return region << REGION_BITS | index if self.arena.regions[region].lend(index, sums) else None

    def give_back(self, slot: int) -> None:
        """See Regions."""
        number, index = place(slot)
        if (region := self.arena.regions.get(number)) is not None:
            region.give_back(index)

    def region_of(self, slot: int) -> int:
        """See Regions."""
        return place(slot)[0]

    @property
    def _is_on_gpus(self) -> bool:
        return jax.default_backend() != "cpu"

    @property
    def _ordinals(self) -> list[int]:
        """The numbers of the devices on this host."""
        return [device.local_hardware_id for device in self._runner.shapes.mesh.local_devices]

    def release(self) -> None:
        """See OpRunner."""
        self._drain()
        delete(self._staging)
        self._staging, self._mark = [], None

    def delete_arrays(self) -> None:
        """See OpRunner."""
        self.release()
        for thread in self._threads:
            thread.shutdown()
        if self._transfer is not None:
            SHORT_TURNS.end()
        if self._opening is not None:
            self.arena.stop()
            with contextlib.suppress(Exception):  # `allocate` raises it
                self._opening.result().close()
                self.arena.close()
            self._opening = self._transfer = None

    def _drain(self) -> None:
        """Wait for the transfers, which have addresses of staging buffers."""
        for thread in self._threads:  # the first gives work to the last, the second to the third
            thread.drain()

    # First runs

    def run_on_nothing(self, key: ProgramKey, program: Any) -> None:
        """Read the null block, or write no block. Requests have ended, but copies may be under way."""
        self._drain()
        staging = self._staging[0]
        if key.kind == Gather.name:
            self._staging[0], _ = programs.gather(self._runner, program, key.size, [], staging)
        else:
            no_sums = np.zeros((self.format.num_devices, 0, self.format.num_sums), np.uint32)
            programs.scatter(self._runner, program, key.size, [], staging, no_sums)


@dataclass(slots=True)
class _LoadState:
    """How far a load is. It is begun or cancelled under the copier's lock."""

    is_copying: bool = False
    is_cancelled: bool = False


@jax.jit
def _next(value: jax.Array) -> jax.Array:
    return value + 1


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=place)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _fail(error: BaseException) -> NoReturn:
    raise error
