"""States of rows to blocks and back: to the bit, on one and more devices, and the same bytes whatever devices hold."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache_spec import CacheArray, CacheLayout, StateArray
from jaxllm.device_ops import GatherBlocks, LoadState, StoreState
from jaxllm.errors import ConfigError
from jaxllm.runner.features.state_copies import copier as state_copier
from jaxllm.runner.features.state_copies.copier import StateCopier
from jaxllm.runner.features.state_copies.programs import Load, Store, run
from jaxllm.runner.features.state_copies.state_format import StateFormat
from tests.helpers.engines import make_core
from tests.helpers.slow import slow_except
from tests.helpers.tiers import need_tiers
from tests.runner.test_block_copies import Copied

NUM_BLOCKS = 64
SIZES = {"kv_offloading_size": 0.002, "num_gpu_blocks_override": NUM_BLOCKS, "warmup": "lazy", "kv_role": "decode"}
CASES: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 4, "block_size": 8},  # two KV heads, copied
    {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "tensor_parallel_size": 2},
]


@pytest.fixture(params=slow_except([], CASES), scope="module", ids=str)
def copied(request: pytest.FixtureRequest) -> Iterator[Copied]:
    need_tiers()
    core = make_core("qwen3_next", **{**SIZES, **request.param})
    try:
        made, count = Copied(core.runner, np.random.default_rng(0)), len(core.runner.shapes.cache.arrays)
        # Numbers, as a CPU makes others of what are none.
        states = tuple(made.rng.standard_normal(state.shape).astype(state.dtype) for state in core.runner.caches[count:])
        core.runner.caches = (*core.runner.caches[:count], *jax.device_put(states, core.runner.shapes.cache_shardings[count:]))
        yield made
    finally:
        core.shutdown()


def blocks_of(copied: Copied, start: int) -> list[int]:
    """Blocks for the states of a row, not in order."""
    return [int(block) for block in start + copied.rng.permutation(copied.runner.shapes.cache.state_blocks)]


def split(copied: Copied) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The bits of blocks, and of states."""
    bits, count = copied.bits(), len(copied.runner.shapes.cache.arrays)
    return bits[:count], bits[count:]


def test_states_come_back_as_they_were_and_others_stay(copied: Copied) -> None:
    blocks, states = split(copied)
    ids = blocks_of(copied, 5)
    run(copied.runner, Store.name, 2, ids)
    others = sorted({*range(NUM_BLOCKS)} - {*ids})
    after, same = split(copied)
    for old, new in zip(blocks, after, strict=True):
        np.testing.assert_array_equal(new[others], old[others])
    for old, new in zip(states, same, strict=True):
        np.testing.assert_array_equal(new, old)
    run(copied.runner, Load.name, 0, ids)
    _, loaded = split(copied)
    for old, new in zip(states, loaded, strict=True):
        np.testing.assert_array_equal(new[0], old[2])
        np.testing.assert_array_equal(new[1:], old[1:])


def test_slots_of_states_have_the_same_bytes_whatever_devices_hold(copied: Copied) -> None:
    """[block][head][words]: a head's part of a block has an equal part of the words of its states."""
    layout, (_, states) = copied.runner.shapes.cache, split(copied)
    ids, slots = blocks_of(copied, 30), copied.slots(layout.state_blocks)
    run(copied.runner, Store.name, 3, ids)
    copied.run(GatherBlocks(1, ids, slots, 0))
    of_heads = np.concatenate([state[3].reshape(len(state[3]), -1) for state in states], axis=1)
    num_heads, num_bytes = of_heads.shape
    head_bytes = layout.block_bytes // num_heads // 4 * 4
    padded = np.zeros((num_heads, head_bytes * layout.state_blocks), np.uint8)
    padded[:, :num_bytes] = of_heads
    for index, slot in enumerate(slots):
        words = copied.copier.arena.words[slot].reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(words, padded[:, index * head_bytes : (index + 1) * head_bytes].reshape(-1))


def test_programs_run_on_nothing(copied: Copied) -> None:
    blocks, states = split(copied)
    for kind in copied.runner.shapes.kinds.values():
        if isinstance(kind, Store | Load):
            (key,) = kind.common(copied.runner.shapes)
            kind.run_on_nothing(copied.runner, key, copied.runner.program(key))
    same, after = split(copied)
    for old, new in zip(blocks, same, strict=True):
        np.testing.assert_array_equal(new, old)
    for old, new in zip(states, after, strict=True):
        np.testing.assert_array_equal(new[:-1], old[:-1])  # all but the row of padding


def test_blocks_of_a_row() -> None:
    layout = CacheLayout((), (CacheArray(2, 8, "float32"),), (), (), block_size=4, max_step_tokens=8)
    assert layout.block_bytes == 256 and layout.state_blocks == 0
    states = (StateArray(4, (3, 5), "bfloat16"), StateArray(4, (4, 4), "float32"))
    layout = CacheLayout((), layout.arrays, states, (), block_size=4, max_step_tokens=8)
    assert layout.state_part_words == 8 + 16 and layout.state_blocks == 2, "16 words of each head in a block"
    layout = replace(layout, states=(*states, StateArray(6, (4,), "float32")))
    assert layout.state_parts == 2 and layout.state_part_words == 15 + 32 + 12 and layout.state_blocks == 2
    layout = replace(layout, states=(StateArray(128, (4,), "float32"),))
    with pytest.raises(ConfigError, match="raise block_size, or use --no-enable-prefix-caching and leave kv_role out"):
        layout.state_blocks  # noqa: B018


def test_states_of_different_heads_come_back_as_they_were() -> None:
    """As of convolutions and of what they feed, which may have other heads."""
    states = (StateArray(4, (3, 5), "bfloat16"), StateArray(6, (4, 4), "float32"))
    layout = CacheLayout((), (CacheArray(2, 8, "float32"),), states, (), block_size=4, max_step_tokens=8)
    format, rng = StateFormat.of(layout, 1), np.random.default_rng(0)
    shapes = [(9, 2, 4, 8), *((3, state.num_heads, *state.shape) for state in states)]
    caches = [
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape, dtype in zip(shapes, ("float32", "bfloat16", "float32"), strict=True)
    ]
    ids = jnp.arange(8, 8 - layout.state_blocks, -1)
    _, *loaded = jax.jit(lambda caches: format.load(format.store(caches, 1, ids), 2, ids))(caches)
    for before, after in zip(caches[1:], loaded, strict=True):
        np.testing.assert_array_equal(after[2], before[1])
        np.testing.assert_array_equal(after[:2], before[:2])


def test_operations_start_with_the_rows_of_their_step_and_read_blocks_before_others_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan may take blocks for states whose contents it also gives to a row."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(state_copier, "run", lambda runner, *call: calls.append(call))
    copier = StateCopier(Mock())
    rows = [SimpleNamespace(data=SimpleNamespace(request_id=name), index=index) for name, index in (("a", 5), ("b", 0))]
    batches: Any = [SimpleNamespace(chunks=[SimpleNamespace(row=row) for row in rows])]
    for op in (StoreState("a", [1, 2]), StoreState("failed", [3, 4]), LoadState("b", [2, 1])):
        copier.run(op)
    assert not calls
    copier.before_step(batches)
    assert calls == [(Load.name, 0, [2, 1]), (Store.name, 5, [1, 2])]
    for forget in (lambda: copier.before_step(()), copier.replace_lost):
        copier.run(LoadState("b", [2, 1]))
        forget()
        copier.before_step(batches)
    assert len(calls) == 2, "an operation ran in the step of another plan"
