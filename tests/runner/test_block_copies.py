"""Blocks to host memory and back: contents to the bit, by engines whose layers keep different things on one and more devices."""

import ctypes
import itertools
import mmap
import resource
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cache_spec import CacheArray, CacheLayout
from jaxllm.config import EngineConfig
from jaxllm.device_ops import FinishedCopy, GatherBlocks, LoadBlocks
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.runner.block_format import BlockFormat, checksums
from jaxllm.runner.features.block_copies import arena as arena_module
from jaxllm.runner.features.block_copies import cuda, cuda_libraries
from jaxllm.runner.features.block_copies.arena import REGION_BITS, Arena, check_memory, check_total
from jaxllm.runner.features.block_copies.block_writer import Layout
from jaxllm.runner.features.block_copies.copier import BlockCopier
from jaxllm.runner.features.block_copies.cuda import CudaTransfer, runs
from jaxllm.runner.features.block_copies.cuda_libraries import CudaError
from jaxllm.runner.features.block_copies.programs import Gather
from jaxllm.runner.features.block_copies.transfer import Waiting
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.scheduler_output import SchedulerOutput
from tests.helpers import goldens
from tests.helpers.engines import SMALL
from tests.helpers.scheduling import make_request
from tests.helpers.slow import slow_except
from tests.helpers.tiers import need_tiers

NUM_BLOCKS = 64
CASES: list[list[Any]] = [
    ["qwen3", {}],
    ["qwen3", {"kv_cache_dtype": "fp8"}],
    ["gemma3", {"tensor_parallel_size": 2}],  # windows; several groups share arrays
    ["gemma4", {"tensor_parallel_size": 2}],  # heads of two widths in an array
    ["llama_mqa", {"tensor_parallel_size": 4}],  # one KV head, copied
    ["deepseek_v3", {"dtype": "bfloat16"}],  # latents
    ["glm_moe_dsa", {"tensor_parallel_size": 2}],  # latents and keys, copied
    ["gemma3", {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "block_size": 8}],  # tokens split too
    ["llama_mqa", {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "block_size": 8}],
]


def make_core(name: str, **options: Any) -> EngineCore:
    """An engine with a tier, which compiles what it runs."""
    need_tiers()
    model = str(goldens.golden(name).directory)
    size = {"kv_offloading_size": 0.002, "num_gpu_blocks_override": NUM_BLOCKS, "warmup": "lazy"}
    return EngineCore(EngineConfig.from_options(**{**SMALL, "model": model, **size, **options}))


class Copied:
    """The copier of an engine whose cache has random bits."""

    def __init__(self, runner: Any, rng: np.random.Generator):
        self.runner, self.rng = runner, rng
        self.copier: BlockCopier = runner.op_runner(GatherBlocks)
        num_copies = self.copier.format.num_copies
        caches = []
        for array in runner.caches:
            blocks, heads, *rest = array.shape
            bits = rng.integers(0, 256, (blocks, heads // num_copies, *rest[:-1], rest[-1] * array.dtype.itemsize), np.uint8)
            caches.append(jax.device_put(bits.repeat(num_copies, 1).view(array.dtype), array.sharding))
        runner.caches = tuple(caches)

    def bits(self) -> list[np.ndarray]:
        """The caches: uint8 [blocks, heads, tokens, bytes]."""
        return [np.asarray(array).copy().view(np.uint8) for array in self.runner.caches]

    def run(self, *ops: GatherBlocks | LoadBlocks) -> list[FinishedCopy]:
        """Run operations in one plan, and wait for all."""
        self.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=ops)).result()
        found: list[FinishedCopy] = []
        while len(found) < len(ops):
            self.copier.wait(10.0)
            found += self.copier.finished()
        for copy in found:
            if copy.error is not None:
                raise copy.error
        return sorted(found)

    def slots(self, count: int) -> list[int]:
        return [int(slot) for slot in self.rng.permutation(self.copier.num_slots)[:count]]


@pytest.fixture(params=slow_except(CASES[:1], CASES), scope="module", ids=str)
def copied(request: pytest.FixtureRequest) -> Iterator[Copied]:
    name, options = request.param
    core = make_core(name, **options)
    try:
        yield Copied(core.runner, np.random.default_rng(0))
    finally:
        core.shutdown()


def test_blocks_come_back_as_they_were_and_others_stay(copied: Copied) -> None:
    before, slots = copied.bits(), copied.slots(25)
    sources, targets = list(range(5, 30)), list(range(62, 37, -1))
    copied.run(GatherBlocks(1, sources, slots, 0))
    (copy,) = copied.run(LoadBlocks(3, targets, slots))
    assert copy.is_right == [True] * 25
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[targets], old[sources])
        np.testing.assert_array_equal(new[:38], old[:38])
        np.testing.assert_array_equal(new[63:], old[63:])


def test_a_copy_to_the_host_begins_while_the_one_before_it_runs(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer: Any = copied.copier._transfer
    to_host, second = transfer.to_host, threading.Event()
    begun: list[Sequence[int]] = []

    def begin(staging: jax.Array, slots: Sequence[int]) -> Waiting:
        begun.append(slots)
        if len(begun) == 2:
            second.set()
        wait = to_host(staging, slots)

        def waiting() -> tuple[jax.Array, float]:
            assert second.wait(30), "the second copy waits for the end of the first"
            return wait()

        return waiting

    monkeypatch.setattr(transfer, "to_host", begin)
    bits, slots = copied.bits(), [[0, 1, 2], [3, 4]]
    copied.run(GatherBlocks(1, [5, 6, 7], slots[0], 0), GatherBlocks(2, [8, 9], slots[1], 1))
    assert begun == slots
    monkeypatch.undo()
    (copy,) = copied.run(LoadBlocks(4, [30, 31, 32, 33, 34], [0, 1, 2, 3, 4]))
    assert copy.is_right == [True] * 5
    for old, new in zip(bits, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[30:35], old[5:10])


def test_beside_steps_a_copy_to_the_host_begins_when_the_one_before_it_is_over(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer: Any = copied.copier._transfer
    to_host, events = transfer.to_host, list[str]()

    def begin(staging: jax.Array, slots: Sequence[int]) -> Waiting:
        events.append("begins")
        wait = to_host(staging, slots)

        def waiting() -> tuple[jax.Array, float]:
            time.sleep(0.02)
            events.append("is over")
            return wait()

        return waiting

    monkeypatch.setattr(transfer, "to_host", begin)
    monkeypatch.setattr(copied.copier, "before_step", lambda batches: None)
    monkeypatch.setattr(copied.copier, "_is_alone", False)
    copied.run(GatherBlocks(1, [5, 6], [0, 1], 0), GatherBlocks(2, [8], [3], 1))
    assert events == ["begins", "is over"] * 2


def test_slots_have_the_same_bytes_whatever_devices_hold(copied: Copied) -> None:
    """[head][array][token][width], for each number of heads; of the first tokens first, where devices split these."""
    bits, slots = copied.bits(), copied.slots(3)
    copied.run(GatherBlocks(1, [7, 40, 9], slots, 1))
    format = copied.copier.format
    for slot, block in zip(slots, [7, 40, 9], strict=True):
        parts = []
        (run,) = format.runs
        of_heads = [bits[index][block, :: format.num_copies] for index in run.arrays]
        for of_tokens in zip(*(np.split(each, format.num_token_parts, axis=1) for each in of_heads), strict=True):
            parts.append(np.concatenate([each.reshape(len(each), -1) for each in of_tokens], axis=1))
        expected = np.concatenate([part.reshape(-1) for part in parts])
        np.testing.assert_array_equal(copied.copier.arena.words[slot].reshape(-1).view(np.uint8), expected)
        assert expected.size == format.block_bytes


def test_a_gather_reads_what_was_there_before_the_rest_of_its_plan(copied: Copied) -> None:
    before, (first, second) = copied.bits(), copied.slots(2)
    copied.run(GatherBlocks(1, [20], [first], 0))
    copied.run(GatherBlocks(3, [50], [second], 0), LoadBlocks(4, [50], [first]))
    copied.run(LoadBlocks(7, [51, 52], [second, first]))
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[50, 51, 52]], old[[20, 50, 20]])


@pytest.mark.parametrize("damage", ["a bit", "words swapped", "blocks swapped"])
def test_damaged_contents_are_noticed_and_not_written(copied: Copied, damage: str) -> None:
    slots = copied.slots(4)
    copied.run(GatherBlocks(1, [10, 11, 12, 13], slots, 0))
    words = copied.copier.arena.words
    wrong = [False, True, False, False]
    if damage == "a bit":
        words[slots[1], -1, -1] ^= 1 << 31
    elif damage == "words swapped":
        words[slots[1], 0, [3, 8]] = words[slots[1], 0, [8, 3]]
    else:
        words[[slots[1], slots[2]]] = words[[slots[2], slots[1]]]
        wrong[2] = True
    before = copied.bits()
    (copy,) = copied.run(LoadBlocks(3, [14, 15, 16, 17], slots))
    assert [not is_right for is_right in copy.is_right] == wrong
    right = [index for index in range(4) if not wrong[index]]
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[14 + index for index in right]], old[[10 + index for index in right]])
    if copied.copier.format.num_devices == 1:
        unchanged = [14 + index for index in range(4) if wrong[index]]
        assert all((new[unchanged] == old[unchanged]).all() for old, new in zip(before, copied.bits(), strict=True))


def test_a_copy_from_a_slot_that_another_content_has_taken_is_noticed(copied: Copied) -> None:
    copier = copied.copier
    arena, targets = copier.arena, [3, 4]
    own = copied.slots(2)
    copied.run(GatherBlocks(1, [5, 6], own, 0))
    old, new = arena.sums[own]
    assert (old != new).any()
    region = copier.add_region(mmap.mmap(-1, 2 * arena.slot_bytes), threading.Event())
    lent = copier.slot(region, 0, old)
    assert lent is not None
    arena.regions[region].words[0] = arena.words[own[1]]  # its lease has ended before the copy began
    again = copier.slot(region, 0, new)
    (copy,) = copied.run(LoadBlocks(3, targets[:1], [lent]))
    assert copy.is_right == [False] and again is None
    copier.give_back(lent)
    again = copier.slot(region, 0, new)
    assert again == lent == copier.slot(region, 0, new), "a content may be lent twice"
    (copy,) = copied.run(LoadBlocks(5, targets[1:], [again]))
    assert copy.is_right == [True]
    copier.remove_region(region)


def test_slots_outlive_the_devices_memory(copied: Copied) -> None:
    before, slots = copied.bits(), copied.slots(2)
    copied.run(GatherBlocks(1, [3, 4], slots, 0))
    copied.runner.memory("drop", "kv_cache")
    copied.runner.memory("restore", "kv_cache")
    copied.run(LoadBlocks(3, [8, 9], slots))
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[8, 9]], old[[3, 4]])


@pytest.mark.parametrize("when", ["it begins", "it is waited for"])
def test_a_load_that_fails_is_no_failure_of_the_step_with_which_it_begins(
    copied: Copied, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("it broke")

    assert copied.copier._transfer is not None
    monkeypatch.setattr(copied.copier._transfer, "to_device", fail if when == "it begins" else lambda *_: fail)
    copied.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=[LoadBlocks(1, [8, 9], copied.slots(2))])).result()
    copied.copier.wait(10.0)
    (copy,) = copied.copier.finished()
    assert copy.number == 1 and str(copy.error) == "it broke"


def test_first_runs_of_programs_leave_copies_alone(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come whenever the engine has no requests, whose last blocks may still be copied."""
    copier, transfer = copied.copier, copied.copier._transfer
    assert transfer is not None
    began, to_host = threading.Event(), transfer.to_host

    def late(staging: jax.Array, slots: Sequence[int]) -> Waiting:
        began.set()
        time.sleep(0.2)
        return to_host(staging, slots)

    monkeypatch.setattr(transfer, "to_host", late)
    before, slots = copied.bits(), copied.slots(2)
    copied.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=[GatherBlocks(1, [3, 4], slots, 0)])).result()
    assert began.wait(10.0)
    for size in copier.sizes:
        key = ProgramKey(Gather.name, size)
        copier.run_on_nothing(key, copied.runner.program(key))
    assert [copy.error for copy in copier.finished()] == [None]
    copied.run(LoadBlocks(3, [8, 9], slots))
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[8, 9]], old[[3, 4]])


@pytest.mark.slow
def test_arrays_with_other_numbers_of_heads_have_a_run_of_their_own() -> None:
    arrays = (CacheArray(2, 8, "float32"), CacheArray(1, 24, "bfloat16"), CacheArray(2, 4, "bfloat16"))
    format = BlockFormat.of(CacheLayout((), arrays, (), (), block_size=8, max_step_tokens=8), num_devices=1)
    assert [(run.arrays, run.num_heads) for run in format.runs] == [((0, 2), 2), ((1,), 1)]
    assert format.block_bytes == 8 * (2 * 8 * 4 + 24 * 2 + 2 * 4 * 2) and format.num_sums == 3
    rng = np.random.default_rng(2)
    caches = [jax.numpy.asarray(rng.standard_normal((6, a.num_heads, 8, a.width)), a.dtype) for a in arrays]
    words, sums = format.gather(caches, np.array([4, 1]))
    empty = [jax.numpy.zeros_like(cache) for cache in caches]
    written, is_right = format.scatter(empty, np.array([2, -1]), words, sums.at[1, 0].add(1))
    assert is_right.tolist() == [True, False]
    for old, new in zip(caches, written, strict=True):
        np.testing.assert_array_equal(new[2], old[4])
        assert not new[np.array([0, 1, 3, 4, 5])].any()


@pytest.mark.parametrize("shape", [(3, 2, 1), (5, 1, 700)])
def test_checksums_are_a_weighted_sum(shape: Sequence[int]) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, shape, np.uint32)
    weights = 2 * np.arange(shape[-1], dtype=np.uint64) + 1
    np.testing.assert_array_equal(checksums(words), (words * weights).sum(-1).astype(np.uint32))


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
    first, second = transfer.to_device(empty, [9, 3, 4]), transfer.to_device(other, [0])
    back, seconds = first()
    np.testing.assert_array_equal(np.asarray(back)[:, :3], rows[:, [4, 2, 3]])
    assert not np.asarray(back)[:, 3:].any() and seconds == pytest.approx(3e-3)
    assert any(fake.streams.values()), "the next one is under way"
    back, seconds = second()
    np.testing.assert_array_equal(np.asarray(back)[:, 0], rows[:, 5])
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


class Beside(CudaTransfer):
    """A transfer whose loads are over when a test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[int], int]] = []
        """Slots of loads, and the numbers of their buffers."""
        self.may_end = [threading.Event() for _ in range(4)]
        self.has_begun = [threading.Event() for _ in range(4)]

    def addresses(self, caches: Sequence[jax.Array]) -> dict[int, tuple[int, ...]]:
        return {}

    def load(self, number: int, staging: jax.Array, slots: Sequence[int], *others: Any, is_alone: bool) -> Any:
        assert is_alone
        self.begun.append((list(slots), number))
        index = len(self.begun) - 1
        self.has_begun[index].set()

        def wait() -> tuple[np.ndarray, float]:
            assert self.may_end[index].wait(30)
            return np.ones(len(slots), bool), 0.001

        return wait


def test_loads_on_gpus_run_two_at_a_time_and_can_be_cancelled() -> None:
    core = make_core("qwen3")
    copier = core.runner.op_runner(GatherBlocks)
    kept, copier._transfer = copier._transfer, (transfer := Beside())
    loads = [LoadBlocks(number, [10 + number], [number]) for number in range(4)]
    core.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=loads)).result()
    assert all(transfer.has_begun[index].wait(30) for index in range(2))
    copier.cancel(2)  # which waits for a buffer
    cancelling = threading.Thread(target=copier.cancel, args=(0,))
    cancelling.start()
    cancelling.join(0.05)
    assert cancelling.is_alive(), "its blocks are being written"
    assert len(transfer.begun) == 2, "there are two buffers"
    transfer.may_end[0].set()
    cancelling.join(30)
    assert not cancelling.is_alive() and transfer.has_begun[2].wait(30)
    for event in transfer.may_end:
        event.set()
    found: list[FinishedCopy] = []
    while len(found) < 4:
        copier.wait(10.0)
        found += copier.finished()
    assert {copy.number: copy.is_right for copy in found} == {0: [True], 1: [True], 2: [False], 3: [True]}
    assert [slots for slots, _ in transfer.begun] == [[0], [1], [3]] and not copier._loads
    assert transfer.begun[0][1] != transfer.begun[1][1]
    copier.run(LoadBlocks(5, [15], [5]))
    copier.replace_lost()  # its step failed
    copier.cancel(5)
    copier.before_step(())
    assert len(transfer.begun) == 3 and not copier._loads
    copier._transfer = kept
    core.shutdown()


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
    back, _ = transfer.to_device(jax.block_until_ready(zeros()), [7, *lent])()
    np.testing.assert_array_equal(np.asarray(back)[:, 1:5], region.words[1:].swapaxes(0, 1))
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


def test_host_memory_is_taken_once_by_runners_of_the_same_engine() -> None:
    """The second has programs for a smaller cache."""
    format = BlockFormat.of(CacheLayout((), (CacheArray(2, 24, "bfloat16"),), (), (), block_size=8, max_step_tokens=8), 1)
    first, second = (BlockCopier(None, format, 1 << 20, 4) for _ in range(2))
    first.begin()
    opening = first._opening
    second.take_over(first)
    first.delete_arrays()
    assert second._opening is opening and second.arena is first.arena
    opening.result()
    second.arena.words[0] = 1  # it is there
    second.delete_arrays()
    assert second._opening is None and not hasattr(second.arena, "words")


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_ends_the_engine() -> None:
    core = make_core("qwen3")
    copier = core.runner.op_runner(GatherBlocks)
    copier._threads[2]._calls.put(("no call", None))
    copier._threads[2]._thread.join()
    copier.run(LoadBlocks(1, [8], [0]))
    copier.before_step(())
    core.add_request(make_request("a", [1, 2, 3], max_tokens=2).spec)
    with pytest.raises(EngineDeadError, match="kv-loaded, which copies blocks"):
        while core.has_unfinished_requests():
            core.step()
    core.shutdown()


def test_host_memory_is_given_back_at_the_end() -> None:
    core = make_core("qwen3")
    memory = weakref.ref(core.runner.op_runner(GatherBlocks).arena.words)
    core.shutdown()
    assert memory() is None, "the engine's objects may live on"


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_of_a_container_count_as_free(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    names = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
    names = names if version == 1 else ("memory.max", "memory.current", "memory.stat")
    texts = ("1000000\n", "900000\n", "anon 1000\nactive_file 300000\ninactive_file 400000\nshmem 50\n")
    files = {f"/sys/fs/cgroup/{name}": text for name, text in zip(names, texts, strict=True)}
    monkeypatch.setattr(arena_module, "_read", lambda path: files.get(path, ""))
    check_memory(500_000)
    with pytest.raises(ConfigError, match="lower it"):
        check_memory(700_000)
    check_total(700_000, 2)
    with pytest.raises(ConfigError, match="for 2 engines together"):
        check_total(800_000, 2)


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size is 1.05e\+06 GiB, but .* are free"):
        check_memory(2**50)
