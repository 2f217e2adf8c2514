"""Blocks to host memory and back: contents to the bit, by engines whose layers keep different things on one and more devices."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cache_spec import CacheArray, CacheLayout
from jaxllm.device_ops import FinishedCopy, GatherBlocks, ScatterBlocks, StageBlocks
from jaxllm.errors import ConfigError
from jaxllm.runner.features.block_copies.arena import check_memory
from jaxllm.runner.features.block_copies.copier import BlockCopier
from jaxllm.runner.features.block_copies.cuda import runs
from jaxllm.runner.features.block_copies.format import BlockFormat, checksums
from jaxllm.scheduler_output import SchedulerOutput
from tests.helpers.engines import make_core
from tests.helpers.slow import slow_except

NUM_BLOCKS = 64
CASES: list[list[Any]] = [
    ["qwen3", {}],
    ["qwen3", {"kv_cache_dtype": "fp8"}],
    ["qwen2", {"dtype": "bfloat16", "tensor_parallel_size": 2}],
    ["gemma3", {"tensor_parallel_size": 2}],  # windows; several groups share arrays
    ["llama_mqa", {"tensor_parallel_size": 4}],  # one KV head, copied
    ["deepseek_v3", {"dtype": "bfloat16"}],  # latents
    ["deepseek_v3", {"tensor_parallel_size": 2}],  # latents, copied
]


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

    def run(self, *ops: GatherBlocks | StageBlocks | ScatterBlocks) -> list[FinishedCopy]:
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
    size = {"kv_offloading_size": 0.002, "num_gpu_blocks_override": NUM_BLOCKS, "warmup": "lazy"}
    core = make_core(name, **{**size, **options})
    try:
        yield Copied(core.runner, np.random.default_rng(0))
    finally:
        core.shutdown()


def test_blocks_come_back_as_they_were_and_others_stay(copied: Copied) -> None:
    before, slots = copied.bits(), copied.slots(25)
    sources, targets = list(range(5, 30)), list(range(62, 37, -1))
    copied.run(GatherBlocks(1, 0, sources, slots))
    copied.run(StageBlocks(2, 3, slots))
    (copy,) = copied.run(ScatterBlocks(3, 3, targets))
    assert copy.is_right == [True] * 25
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[targets], old[sources])
        np.testing.assert_array_equal(new[:38], old[:38])
        np.testing.assert_array_equal(new[63:], old[63:])


def test_slots_have_the_same_bytes_whatever_devices_hold(copied: Copied) -> None:
    """[head][array][token][width], for each number of heads."""
    bits, slots = copied.bits(), copied.slots(3)
    copied.run(GatherBlocks(1, 1, [7, 40, 9], slots))
    format = copied.copier.format
    for slot, block in zip(slots, [7, 40, 9], strict=True):
        parts = []
        for run in format.runs:
            of_heads = [bits[index][block, :: format.num_copies] for index in run.arrays]
            assert len(format.runs) == 1
            parts.append(np.concatenate([each.reshape(len(each), -1) for each in of_heads], axis=1))
        expected = np.concatenate([part.reshape(-1) for part in parts])
        np.testing.assert_array_equal(copied.copier.arena.words[slot].reshape(-1).view(np.uint8), expected)
        assert expected.size == format.block_bytes


def test_a_gather_reads_what_was_there_before_the_rest_of_its_plan(copied: Copied) -> None:
    before, (first, second) = copied.bits(), copied.slots(2)
    copied.run(GatherBlocks(1, 0, [20], [first]))
    copied.run(StageBlocks(2, 1, [first]))
    copied.run(GatherBlocks(3, 0, [50], [second]), ScatterBlocks(4, 1, [50]), GatherBlocks(5, 2, [50], [first]))
    copied.run(StageBlocks(6, 0, [second, first]))
    copied.run(ScatterBlocks(7, 0, [51, 52]))
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[50, 51, 52]], old[[20, 50, 20]])


@pytest.mark.parametrize("damage", ["a bit", "words swapped", "blocks swapped"])
def test_damaged_contents_are_noticed_and_not_written(copied: Copied, damage: str) -> None:
    slots = copied.slots(4)
    copied.run(GatherBlocks(1, 0, [10, 11, 12, 13], slots))
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
    copied.run(StageBlocks(2, 2, slots))
    (copy,) = copied.run(ScatterBlocks(3, 2, [14, 15, 16, 17]))
    assert [not is_right for is_right in copy.is_right] == wrong
    right = [index for index in range(4) if not wrong[index]]
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[14 + index for index in right]], old[[10 + index for index in right]])
    if copied.copier.format.num_devices == 1:
        unchanged = [14 + index for index in range(4) if wrong[index]]
        assert all((new[unchanged] == old[unchanged]).all() for old, new in zip(before, copied.bits(), strict=True))


def test_slots_outlive_the_devices_memory(copied: Copied) -> None:
    before, slots = copied.bits(), copied.slots(2)
    copied.run(GatherBlocks(1, 0, [3, 4], slots))
    copied.runner.memory("drop", "kv_cache")
    copied.runner.memory("restore", "kv_cache")
    copied.run(StageBlocks(2, 0, slots))
    copied.run(ScatterBlocks(3, 0, [8, 9]))
    for old, new in zip(before, copied.bits(), strict=True):
        np.testing.assert_array_equal(new[[8, 9]], old[[3, 4]])


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
    assert list(runs([4, 5, 6, 2, 3, 9])) == [(0, 4, 3), (3, 2, 2), (5, 9, 1)]
    assert list(runs([])) == []


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size is 1.05e\+06 GiB, but .* are free"):
        check_memory(2**50)
