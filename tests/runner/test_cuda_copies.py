"""Copies between staging buffers, host memory and blocks by CUDA, which a fake makes: what is locked, copied, written, and given back."""

import ctypes
import itertools
import mmap
import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cache_spec import CacheArray, CacheLayout
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies import cuda, cuda_libraries
from jaxllm.runner.features.block_copies.arena import REGION_BITS, Arena
from jaxllm.runner.features.block_copies.block_writer import Layout
from jaxllm.runner.features.block_copies.copier import BlockCopier
from jaxllm.runner.features.block_copies.cuda import CudaTransfer, runs
from jaxllm.runner.features.block_copies.cuda_libraries import CudaError


def test_consecutive_slots_are_one_copy() -> None:
    assert list(runs([4, 5, 6, 2, 3, 9], 100, 1)) == [(0, 4, 3), (3, 2, 2), (5, 9, 1)]
    assert list(runs([4, 5, 6, 7, 8, 9, 10], 4, 1)) == [(0, 4, 4), (4, 8, 3)], "a piece ends behind slot 7"
    assert list(runs([], 4, 1)) == []
    lent = [(1 << REGION_BITS) + index for index in (1, 2, 3)]
    assert list(runs([0, *lent], 4, 2)) == [(0, 0, 1), (1, lent[0], 1), (2, lent[1], 2)], "a piece ends behind the first"


class FakeCuda:
    """CUDA's runtime: copies are made when their stream, or an event behind them, is waited for, and need host memory that one call has
    locked."""

    failing = ""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.allocated: dict[int, Any] = {}
        self.streams: dict[int, list[tuple[int, ...]]] = {}
        self.events: dict[int, tuple[int, int]] = {}
        """The stream of each event, and how many copies there are before it."""
        self.num_events = 0
        self.num_made: Counter[int] = Counter()
        self.cudaGetErrorName = lambda code: b"cudaErrorOfTest"
        self.num_copies = 0

    def cudaHostRegister(self, address: ctypes.c_void_p, size: ctypes.c_size_t, flags: int) -> int:
        assert flags in (1, 9) and address.value and address.value % 4096 == size.value % 4096 == 0
        self.locked[address.value] = size.value
        return int(self.failing == "cudaHostRegister" and len(self.locked) > 1)

    def cudaHostUnregister(self, address: ctypes.c_void_p) -> int:
        del self.locked[address.value or 0]
        return int(self.failing == "cudaHostUnregister")

    def cudaSetDevice(self, ordinal: int) -> int:
        return 0

    def cudaMalloc(self, pointer: Any, size: ctypes.c_size_t) -> int:
        memory = ctypes.create_string_buffer(size.value)
        pointer._obj.value = ctypes.addressof(memory)
        self.allocated[pointer._obj.value] = memory
        return 0

    def cudaFree(self, pointer: ctypes.c_void_p) -> int:
        del self.allocated[pointer.value or 0]
        return 0

    def cudaStreamCreateWithFlags(self, stream: Any, flags: int) -> int:
        stream._obj.value = len(self.streams) + 1
        self.streams[stream._obj.value] = []
        return 0

    def cudaStreamDestroy(self, stream: ctypes.c_void_p) -> int:
        return len(self.streams.pop(stream.value or 0))

    def cudaMemcpy2DAsync(self, *arguments: Any) -> int:
        to, to_pitch, source, source_pitch, width, height, kind, stream = (getattr(each, "value", each) for each in arguments)
        assert kind == 4 and width <= min(to_pitch, source_pitch)
        ends = [(to, to + to_pitch * (height - 1) + width), (source, source + source_pitch * (height - 1) + width)]
        assert any(at <= start and end <= at + size for start, end in ends for at, size in self.locked.items())
        self.streams[stream] += [(to + row * to_pitch, source + row * source_pitch, width) for row in range(height)]
        self.num_copies += 1
        return int(self.failing == "cudaMemcpy2DAsync" and self.num_copies > 1)

    def cudaStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        self._make(stream.value or 0, len(self.streams[stream.value or 0]))
        return 0

    def _make(self, stream: int, count: int) -> None:
        for copy in self.streams[stream][:count]:
            ctypes.memmove(*copy)
        del self.streams[stream][:count]
        self.num_made[stream] += count

    def cudaEventCreate(self, event: Any) -> int:
        self.num_events += 1
        event._obj.value = self.num_events
        self.events[self.num_events] = (0, 0)
        return 0

    def cudaEventRecord(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        of = stream.value or 0
        self.events[event.value or 0] = of, self.num_made[of] + len(self.streams[of])
        return 0

    def cudaEventSynchronize(self, event: ctypes.c_void_p) -> int:
        stream, number = self.events[event.value or 0]
        self._make(stream, max(0, number - self.num_made[stream]))
        return int(self.failing == "cudaEventSynchronize")

    def cudaEventElapsedTime(self, milliseconds: Any, start: ctypes.c_void_p, end: ctypes.c_void_p) -> int:
        stream, first = self.events[start.value or 0]
        _, last = self.events[end.value or 0]
        assert last <= self.num_made[stream]
        milliseconds._obj.value = last - first
        return 0

    def cudaEventDestroy(self, event: ctypes.c_void_p) -> int:
        del self.events[event.value or 0]
        return 0


class FakeWriter:
    """A BlockWriter that does what its kernels do when it is waited for."""

    num_failing = 0

    def __init__(self, runtime: Any, format: BlockFormat, ordinal: int, max_rows: int, num_buffers: int):
        self.layout, self.row_words, self.num_begun = Layout(format), format.part_words, 0

    def begin(
        self, buffer: int, rows: int, arrived: Any, block_ids: Sequence[int], sums_nH: np.ndarray, addresses: Sequence[int]
    ) -> Callable[[], np.ndarray]:
        if self.num_failing:
            raise CudaError("it broke")
        self.num_begun += 1
        return lambda: self.write(rows, block_ids, sums_nH, self.layout.at(addresses))

    def write(self, rows: int, block_ids: Sequence[int], sums_nH: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        is_right, layout = np.ones(len(block_ids), bool), self.layout
        words = np.ctypeslib.as_array(ctypes.cast(rows, ctypes.POINTER(ctypes.c_uint32)), (len(block_ids), self.row_words))
        for row, (block, sums_H) in enumerate(zip(block_ids, sums_nH, strict=True)):
            for head, (start, end) in enumerate(itertools.pairwise(layout.starts)):
                weights = 2 * np.arange(end - start, dtype=np.uint32) + 1
                is_right[row] &= (words[row, start:end] * weights).sum(dtype=np.uint32) == sums_H[head]
            for piece in pieces if is_right[row] else ():
                source = words[row, piece["from"] :][: piece["words"]]
                ctypes.memmove(int(piece["to"]) + block * int(piece["block_bytes"]), source.ctypes.data, source.nbytes)
        return is_right

    def synchronize(self) -> None:
        self.num_begun = 0

    def close(self) -> None:
        """Nothing is held."""


LAYOUT = CacheLayout((), (CacheArray(2, 24, "bfloat16"),), (), (), block_size=8, max_step_tokens=8)


def cuda_copies(
    monkeypatch: pytest.MonkeyPatch, num_copies: int, num_devices: int = 2, layout: CacheLayout = LAYOUT
) -> tuple[FakeCuda, Arena, CudaTransfer, jax.sharding.Sharding]:
    """10 slots, locked in pieces of 3, for blocks on 2 devices."""
    format, fake = BlockFormat.of(layout, num_devices, num_copies), FakeCuda()
    monkeypatch.setattr(cuda_libraries, "load_runtime", lambda: (fake, fake))
    monkeypatch.setattr(cuda, "BlockWriter", FakeWriter)
    monkeypatch.setattr(cuda, "_REGISTERED_BYTES", 3 * 4096 + 100)
    arena = Arena(10 * 4096, format)
    arena.open()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("devices",))
    return (
        fake,
        arena,
        CudaTransfer(arena, format, list(range(num_devices)), max_rows=8, num_loads=2),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices")),
    )


@pytest.mark.parametrize("num_copies", [1, 2])
def test_copies_of_cuda_reach_the_slots_and_come_back(monkeypatch: pytest.MonkeyPatch, num_copies: int) -> None:
    fake, arena, transfer, place = cuda_copies(monkeypatch, num_copies)
    assert sorted(size // 4096 for size in fake.locked.values()) == [1, 3, 3, 3]
    assert len(fake.streams) == 4, "made before the first copy"
    _, num_parts, part_words = arena.words.shape
    rows = np.random.default_rng(0).integers(0, 2**32, (num_parts, 8, part_words), np.uint32).repeat(num_copies, 0)
    slots = [1, 2, 3, 4, 9, 0]
    _, seconds = transfer.to_host(jax.device_put(rows, place), slots)()
    assert seconds == pytest.approx(6e-3), "of the device that took longest"
    np.testing.assert_array_equal(arena.words[slots], rows[::num_copies, :6].swapaxes(0, 1))
    assert not arena.words[[5, 6, 7, 8]].any() and fake.num_copies == 4 * num_parts
    zeros = jax.jit(lambda: jax.numpy.zeros(rows.shape, np.uint32), out_shardings=place)
    empty, other = jax.block_until_ready((zeros(), zeros()))  # raw copies do not wait for programs
    first, second = transfer._begin("in", empty, [9, 3, 4]), transfer._begin("in", other, [0])
    seconds = max(span.wait() for span in first)
    np.testing.assert_array_equal(np.asarray(empty)[:, :3], rows[:, [4, 2, 3]])
    assert not np.asarray(empty)[:, 3:].any() and seconds == pytest.approx(3e-3)
    assert any(fake.streams.values()), "the next one is under way"
    seconds = max(span.wait() for span in second)
    np.testing.assert_array_equal(np.asarray(other)[:, 0], rows[:, 5])
    assert seconds == pytest.approx(1e-3) and not fake.events
    fake.failing = "cudaHostUnregister"
    transfer.close()  # as far as it can
    assert not fake.locked and not fake.streams


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside steps"])
def test_loads_of_cuda_write_blocks_that_have_the_right_checksums(monkeypatch: pytest.MonkeyPatch, is_alone: bool) -> None:
    """On two devices, of arrays with different numbers of heads: as the program of CPUs writes them."""
    arrays = (CacheArray(4, 8, "float32"), CacheArray(2, 24, "bfloat16"), CacheArray(4, 4, "bfloat16"))
    fake, arena, transfer, place = cuda_copies(
        monkeypatch, 1, layout=CacheLayout((), arrays, (), (), block_size=8, max_step_tokens=8)
    )
    format, rng, slots, blocks = transfer._format, np.random.default_rng(0), [7, 2, 3], [4, 0, 2]
    caches = [[rng.standard_normal((6, a.num_heads // 2, 8, a.width)).astype(a.dtype) for a in arrays] for _ in range(2)]
    sums = []
    for device, of_device in enumerate(caches):
        words, sums_nH = format.gather(list(map(jax.numpy.asarray, of_device)), np.array([1, 3, 5]))
        arena.words[slots, device] = words
        sums.append(np.array(sums_nH))
    sums[1][2, -1] += 1
    addresses = {device: tuple(each.ctypes.data for each in of_device) for device, of_device in enumerate(caches)}
    zeros = jax.jit(lambda: jax.numpy.zeros((2, 8, format.part_words), np.uint32), out_shardings=place)
    arguments = slots, blocks, np.stack(sums), addresses
    before = [[each.copy() for each in of_device] for of_device in caches]
    wait = transfer.load(1, jax.block_until_ready(zeros()), *arguments, is_alone=is_alone)
    assert any(fake.streams.values()) == is_alone, "a copy may be queued behind this one"
    assert all((old == new).all() for pair in zip(before, caches, strict=True) for old, new in zip(*pair, strict=True))
    is_right, seconds = wait()
    assert is_right.tolist() == [True, True, False] and seconds > 0
    for device, (old, new) in enumerate(zip(before, caches, strict=True)):
        words = jax.numpy.asarray(arena.words[slots, device])
        expected, _ = format.scatter(
            list(map(jax.numpy.asarray, old)), np.array(blocks), words, jax.numpy.asarray(sums[device])
        )
        for one, other in zip(new, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(FakeWriter, "num_failing", 1)
    with pytest.raises(CudaError, match="it broke"):
        transfer.load(0, jax.block_until_ready(zeros()), *arguments, is_alone=is_alone)
    assert not any(fake.streams.values()) and not fake.events, "a copy is under way"
    assert not any(writer.num_begun for writer in transfer._writers.values())
    transfer.close()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_addresses_are_those_of_each_devices_arrays(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    _, _, transfer, place = cuda_copies(monkeypatch, 1, num_devices)
    caches = [jax.device_put(np.zeros((2 * num_devices, size), np.float32), place) for size in (3, 5)]
    found = transfer.addresses(caches)
    shards = [{shard.device.local_hardware_id: shard.data for shard in cache.addressable_shards} for cache in caches]
    assert found == {
        ordinal: tuple(of_cache[ordinal].unsafe_buffer_pointer() for of_cache in shards) for ordinal in range(num_devices)
    }
    transfer.close()


def test_copies_of_cuda_from_memory_that_another_process_lends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LENT_BYTES", 2 * 4096)
    fake, arena, transfer, place = cuda_copies(monkeypatch, 1, num_devices=1)
    memory = mmap.mmap(-1, 5 * 4096)
    number = arena.add_region(memory)
    region = arena.regions[number]
    region.words[...] = np.random.default_rng(0).integers(0, 2**32, region.words.shape, np.uint32)
    num_locked, num_allocated = len(fake.locked), len(fake.allocated)
    monkeypatch.setattr(fake, "cudaMalloc", lambda *arguments: 2)  # the device has no memory left
    transfer.add_region(number, region, threading.Event())
    assert sorted(size // 4096 for size in fake.locked.values())[: len(fake.locked) - num_locked] == [1, 1, 2]
    zeros = jax.jit(lambda: jax.numpy.zeros((1, 8, region.words.shape[2]), np.uint32), out_shardings=place)
    lent = [(number << REGION_BITS) + index for index in (1, 2, 3, 4)]
    (span,) = transfer._begin("in", staging := jax.block_until_ready(zeros()), [7, *lent])
    span.wait()
    np.testing.assert_array_equal(np.asarray(staging)[:, 1:5], region.words[1:].swapaxes(0, 1))
    transfer.remove_region(number)
    monkeypatch.setattr(fake, "failing", "cudaMemcpy2DAsync")
    with pytest.raises(CudaError):
        transfer.add_region(number, region, threading.Event())  # what devices cannot read is found before a step needs it
    assert len(fake.locked) == num_locked and len(fake.allocated) == num_allocated and not any(fake.streams.values())
    transfer.close()
    assert not fake.locked and not fake.allocated


class Stop(threading.Event):
    """Notes pauses, and is set after so many."""

    def __init__(self, num_pauses: int):
        super().__init__()
        self.num_pauses, self.pauses = num_pauses, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        return len(self.pauses) >= self.num_pauses


def test_memory_that_another_process_lends_is_locked_with_pauses_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them steps waited for all of it: first tokens took a second more."""
    monkeypatch.setattr(cuda, "_LENT_BYTES", 2 * 4096)
    fake, arena, transfer, _ = cuda_copies(monkeypatch, 1, num_devices=1)
    number, locked, seconds = arena.add_region(mmap.mmap(-1, 5 * 4096)), dict(fake.locked), itertools.count(0, 0.25)
    monkeypatch.setattr(cuda, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    stop = Stop(100)
    transfer.add_region(number, arena.regions[number], stop)
    assert stop.pauses == pytest.approx([1.0] * 3), "steps get four times as long as they waited"
    transfer.remove_region(number)
    with pytest.raises(CudaError, match="not needed any more"):
        transfer.add_region(number, arena.regions[number], Stop(2))
    assert fake.locked == locked
    transfer.close()


def test_engines_of_several_devices_lock_no_memory_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, arena, transfer, _ = cuda_copies(monkeypatch, 1)
    locked = dict(fake.locked)
    number = arena.add_region(mmap.mmap(-1, 2 * arena.slot_bytes))
    with pytest.raises(CudaError, match="devices that share the engine's layers"):
        transfer.add_region(number, arena.regions[number], threading.Event())
    assert fake.locked == locked
    transfer.close()


@pytest.mark.parametrize(("failing", "num_copies"), [("cudaMemcpy2DAsync", 2), ("cudaEventSynchronize", 4)])
def test_a_failed_copy_of_cuda_leaves_none_under_way(monkeypatch: pytest.MonkeyPatch, failing: str, num_copies: int) -> None:
    """The buffers may be given away next."""
    fake, _, transfer, place = cuda_copies(monkeypatch, 1)
    fake.failing = failing
    with pytest.raises(CudaError, match=f"{failing} failed: cudaErrorOfTest"):
        transfer.to_host(jax.device_put(np.zeros((2, 8, 96), np.uint32), place), [1, 5])()
    assert fake.num_copies == num_copies and not any(fake.streams.values()) and not fake.events


def test_memory_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "failing", "cudaHostRegister")
    with pytest.raises(
        ConfigError, match=r"CUDA cannot lock so much memory \(cudaHostRegister failed: cudaErrorOfTest\); lower it"
    ):
        cuda_copies(monkeypatch, 1)


@pytest.mark.parametrize(
    ("limit", "arena_bytes", "expected"),
    [
        (5 * 4096 + 7, 10 * 4096, 6),  # a page more than the limit
        (0, 10 * 4096, 1),
        (-1, 10 * 4096, 1),  # no limit
        (10 * 4096, 10 * 4096, 1),
        (1 << 30, 1 << 40, 1),  # to try so much would take long
    ],
)
def test_a_small_piece_tells_whether_memory_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, limit: int, arena_bytes: int, expected: int
) -> None:
    fake, tried = FakeCuda(), list[int]()
    monkeypatch.setattr(cuda_libraries, "load_runtime", lambda: (fake, fake))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    fake.cudaHostUnregister = lambda address: tried.append(fake.locked.pop(address.value or 0)) or 0  # type: ignore[method-assign]
    cuda.check_locking(arena_bytes, 0)
    assert tried == [expected * 4096] and not fake.locked


def test_memory_that_cannot_be_locked_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, copier = opening(monkeypatch)
    monkeypatch.setattr(FakeCuda, "cudaHostRegister", lambda self, address, size, flags: 2)
    with pytest.raises(ConfigError, match="kv_offloading_size is .* CUDA cannot lock so much memory"):
        copier.begin()
    assert copier.arena.descriptor is None and not hasattr(copier.arena, "words")


def test_another_client_of_xla_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, copier = opening(monkeypatch)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "1")
    with pytest.raises(
        ConfigError, match="XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT is set, .*; unset it, or leave kv_offloading_size"
    ):
        copier.begin()
    assert copier.arena.descriptor is None and not fake.locked


def test_memory_that_the_system_has_not_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, copier = opening(monkeypatch)
    copier.arena.num_slots = 1 << 45  # more than addresses
    with pytest.raises(ConfigError, match="kv_offloading_size is .* GiB: .*; lower it"):
        copier.begin()


def test_memory_is_unlocked_where_a_stream_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeCuda] = []
    monkeypatch.setattr(FakeCuda, "cudaStreamCreateWithFlags", lambda self, *args: made.append(self) or 2)
    with pytest.raises(CudaError, match="cudaStreamCreateWithFlags failed"):
        cuda_copies(monkeypatch, 1)
    assert not made[0].locked


def test_touching_reaches_every_page_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arena, _, _ = cuda_copies(monkeypatch, 1)  # a slot is longer than its words
    arena.words[:] = 2**32 - 1
    arena.touch()
    assert (arena.words[:, 0, 0] == 0xFFFFFF00).all() and (arena.words[:, 0, 1:] == 2**32 - 1).all()


def test_touching_ends_with_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arena, _, _ = cuda_copies(monkeypatch, 1)
    arena.words[:] = 2**32 - 1
    arena.stop()
    arena.touch()
    assert (arena.words == 2**32 - 1).all()


def opening(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCuda, BlockCopier]:
    """A copier on a GPU, whose memory other processes may map."""
    fake = FakeCuda()
    format = BlockFormat.of(LAYOUT, 1)
    monkeypatch.setattr(cuda, "BlockWriter", FakeWriter)
    monkeypatch.setattr(cuda_libraries, "load_runtime", lambda: (fake, fake))
    monkeypatch.setattr(cuda, "_REGISTERED_BYTES", 3 * 4096)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    runner = SimpleNamespace(shapes=SimpleNamespace(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("devices",))))
    return fake, BlockCopier(runner, format, 10 * 4096, 4, is_shared=True)


def test_memory_is_not_locked_once_the_start_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To lock pages that were not touched takes longest."""
    fake, copier = opening(monkeypatch)
    copier.arena.open()
    copier.arena.stop()
    with pytest.raises(EngineDeadError):
        copier._open()
    assert not fake.locked and copier.arena.descriptor is None and not hasattr(copier.arena, "words")


def test_memory_that_cannot_be_locked_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, copier = opening(monkeypatch)
    fake.failing = "cudaHostRegister"
    copier.begin()
    assert copier._opening is not None and isinstance(copier._opening.exception(), ConfigError)
    assert copier.arena.descriptor is None and not hasattr(copier.arena, "words")
    copier.delete_arrays()
