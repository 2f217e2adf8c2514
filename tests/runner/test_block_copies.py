"""Blocks to host memory and back: contents to the bit, by engines whose layers keep different things on one and more devices."""

import mmap
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
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
from jaxllm.runner.features.block_copies.arena import check_memory, check_total
from jaxllm.runner.features.block_copies.copier import BlockCopier
from jaxllm.runner.features.block_copies.cuda import CudaTransfer
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
