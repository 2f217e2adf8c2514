"""Cache contents of layers: how they are grouped, what a request holds, what a cached prefix must have."""

import random

import pytest

from jaxllm.cache_policy import FULL, CachePolicy, FullPolicy, WindowPolicy
from jaxllm.cache_spec import (
    CacheLayout,
    CacheView,
    FullCache,
    RowState,
    SharedCache,
    StateArray,
    WindowCache,
    cache_layout,
    cache_specs,
    row_bytes,
)
from jaxllm.errors import ConfigError
from jaxllm.models.load_config import load_model_config
from tests.helpers import goldens

F, W, V = FullCache(2, 8, "float32"), WindowCache(2, 8, "float32", 32), WindowCache(2, 8, "float32", 5)
PAIR_BYTES = 2 * 2 * 8 * 4
"""Bytes of a token in one layer."""


def layout_of(*specs) -> CacheLayout:
    return cache_layout(specs, block_size=16, max_step_tokens=64)


def groups_of(layout: CacheLayout) -> list[tuple[CachePolicy, tuple[int, ...]]]:
    return [(group.policy, group.layers) for group in layout.groups]


@pytest.mark.parametrize("spec", [F, W])
def test_layers_of_one_kind_are_one_group_with_arrays_of_their_own(spec):
    layout = layout_of(spec, spec, spec)
    assert groups_of(layout) == [(spec.policy, (0, 1, 2))]
    assert [(place.group, place.arrays) for place in layout.places] == [(0, (0, 1)), (0, (2, 3)), (0, (4, 5))]
    assert layout.block_bytes == 16 * 3 * PAIR_BYTES


def test_groups_of_equal_size_share_arrays():
    layout = layout_of(W, W, F, W, W, F)
    window = W.policy
    assert groups_of(layout) == [(FULL, (2, 5)), (window, (0, 1)), (window, (3, 4))]
    assert [place.arrays for place in layout.places] == [(0, 1), (2, 3), (0, 1), (0, 1), (2, 3), (2, 3)]
    assert len(layout.arrays) == 4 and layout.block_bytes == 16 * 2 * PAIR_BYTES


@pytest.mark.parametrize("other", [FullCache(1, 40, "float32"), FullCache(1, 64, "bfloat16"), FullCache(8, 8, "float32")])
def test_layers_with_other_arrays_do_not_share_them(other):
    """Arrays whose size others do not divide, in another type, or with more heads of the same width."""
    layout = layout_of(W, other, W, other)
    assert [place.arrays for place in layout.places] == [(2, 3), (0, 1), (6, 7), (4, 5)]
    assert [layout.arrays[index].width for index in (0, 2)] == [other.head_dim, 8]


def test_a_block_of_wide_heads_holds_several_layers_of_narrow_ones():
    wide = FullCache(1, 64, "float32")
    layout = layout_of(W, W, W, W, wide, W, SharedCache(2), SharedCache(4))
    assert groups_of(layout) == [(FULL, (4,)), (W.policy, (0, 1, 2, 3)), (W.policy, (5,))]
    assert {place.arrays for place in layout.places} == {(0, 1)} and layout.arrays == wide.arrays
    views = [place.view for place in layout.places]
    assert views[:4] == [CacheView(4, index, 2, 8) for index in range(4)] and views[4] is None
    assert (views[5], views[6], layout.places[7]) == (CacheView(4, 0, 2, 8), views[2], layout.places[4])


@pytest.mark.parametrize(
    ("narrow", "wide", "sizes", "num_arrays"),
    [
        ({WindowCache(16, 256, "bfloat16", 1024): 50}, {FullCache(4, 512, "bfloat16"): 10}, [10] + [5] * 10, 5),  # 31B
        ({WindowCache(8, 256, "bfloat16", 1024): 25}, {FullCache(2, 512, "bfloat16"): 5}, [5] + [3] * 8 + [1], 3),  # 26B-A4B
        ({WindowCache(1, 256, "bfloat16", 512): 12}, {FullCache(1, 512, "bfloat16"): 3}, [3, 6, 6], 3),  # E2B
        ({WindowCache(2, 256, "bfloat16", 512): 20}, {FullCache(2, 512, "bfloat16"): 4}, [2, 2] + [4] * 5, 2),  # E4B
        # 31B on eight devices and 26B-A4B on four, which copy heads of full layers: a layer of either kind fills an array.
        ({WindowCache(16, 256, "bfloat16", 1024): 50}, {FullCache(8, 512, "bfloat16"): 10}, [10] * 6, 10),
        ({WindowCache(8, 256, "bfloat16", 1024): 25}, {FullCache(4, 512, "bfloat16"): 5}, [5] * 6, 5),
    ],
)
def test_groups_of_two_widths_fill_their_blocks(narrow, wide, sizes, num_arrays):
    """Gemma 4. Of 31B and 26B-A4B two full layers fit into the array of one with a window, of the others the reverse."""
    layout = layout_of(*(spec for specs in (narrow, wide) for spec, count in specs.items() for _ in range(count)))
    assert [len(group.layers) for group in layout.groups] == sizes
    assert len(layout.arrays) == 2 * num_arrays and len(set(layout.arrays)) == 1 and layout.has_views


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        ({F: 8, W: 40}, [8] * 6),  # Gemma 3 12B
        ({F: 10, W: 52}, [10] * 6 + [2]),  # 27B
        ({F: 5, W: 29}, [5] * 6 + [4]),  # 4B
        ({F: 12, W: 12}, [12] * 2),  # gpt-oss 20B
        ({F: 21, W: 7}, [7] * 4),
        ({F: 1, W: 5}, [1] * 6),
        ({W: 20, V: 19}, [20, 19]),
    ],
)
def test_groups_are_few_and_waste_little(num_layers, sizes):
    layout = layout_of(*(spec for spec, count in num_layers.items() for _ in range(count)))
    assert [len(group.layers) for group in layout.groups] == sizes
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(sum(num_layers.values())))
    assert len(layout.arrays) == 2 * max(sizes)


def test_layers_with_a_state_by_row_are_in_no_group():
    state = RowState((StateArray(2, (3, 20), "bfloat16"), StateArray(2, (4, 8), "float32")))
    layout = layout_of(state, F, state, state, F)
    assert groups_of(layout) == [(FULL, (1, 4))]
    assert [(place.group, place.arrays) for place in layout.places] == [
        *((None, (4, 5)), (0, (0, 1)), (None, (6, 7)), (None, (8, 9)), (0, (2, 3)))
    ]
    assert layout.states == state.arrays * 3
    assert layout.row_bytes == 3 * (2 * 3 * 20 * 2 + 2 * 4 * 8 * 4) and layout.block_bytes == 16 * 2 * PAIR_BYTES
    with pytest.raises(ConfigError, match="no layer of the model has a KV cache"):
        layout_of(state, state)


def test_states_of_linear_attention_are_float32_and_inputs_of_its_convolution_of_the_models_type():
    config = load_model_config(goldens.FOLDER / "qwen3_next", dtype="bfloat16", kv_cache_dtype="fp8")
    state, *_, full = cache_specs(config)
    assert isinstance(state, RowState) and isinstance(full, FullCache) and full.dtype == "float8_e4m3fn"
    assert [array.dtype for array in state.arrays] == ["bfloat16", "float32"]
    assert row_bytes(config) == 3 * 4 * (3 * 48 * 2 + 2 * 16 * 8 * 4) == row_bytes(config.for_tensor_parallel(4))


def test_specs_follow_the_model_and_count_copies_of_heads():
    config = load_model_config(goldens.FOLDER / "qwen2_window")
    full, window = cache_specs(config)
    assert (full.policy, window.policy) == (FULL, WindowPolicy(16))
    assert {spec.policy for spec in cache_specs(config, disable_windows=True)} == {FULL}
    assert full.arrays == window.arrays and sum(array.bytes_per_token for array in full.arrays) == 2 * 2 * 8 * 4
    copied = cache_specs(config.for_tensor_parallel(8))[0]
    assert sum(array.bytes_per_token for array in copied.arrays) == 4 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("specs", [(F,), (W,), (F, W), (F, V, W)])
def test_the_longest_request_that_fits_is_found(specs):
    layout = layout_of(*specs)
    for num_blocks in (0, 1, 5, 11, 12, 13, 40):
        longest = layout.max_tokens(num_blocks)
        assert longest == 0 or layout.num_blocks_for(longest) <= num_blocks
        assert longest == 2**31 - 1 or layout.num_blocks_for(longest + 1) > num_blocks
    assert (layout.max_tokens(40) == 2**31 - 1) == (specs == (W,))


POLICIES = [FullPolicy(), *map(WindowPolicy, (1, 2, 7, 8, 9, 16, 40))]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_steps_read_is_there_and_no_request_holds_more_than_promised(policy):
    rng, most = random.Random(3), 0
    for _ in range(300):
        length, max_step, start = rng.randint(1, 120), rng.choice([1, 3, 20]), 0
        while start < length:
            count = min(rng.randint(1, max_step), length - start)
            first_read = 0 if policy == FULL else max(0, start - policy.window + 1)
            num_expired = policy.num_expired(start, 8)
            assert num_expired == first_read // 8, "blocks are kept as long as they are read, and no longer"
            held = -(-(start + count) // 8) - num_expired
            assert held <= policy.num_blocks_for(length, 8, max_step)
            most, start = max(most, held), start + count
    assert most == policy.num_blocks_for(120, 8, 20), "the promise is no larger than needed"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_longest_prefix_has_all_blocks_that_the_next_token_reads(policy):
    rng = random.Random(5)

    def serves(cached: list[bool], count: int) -> bool:
        # The last token of the prefix may be computed again.
        return all(cached[policy.num_expired(max(0, count * 8 - 1), 8) : count])

    for _ in range(500):
        cached = [rng.random() < 0.8 for _ in range(rng.randint(0, 12))]
        expected = max(count for count in range(len(cached) + 1) if serves(cached, count))
        names = [bytes([index]) for index in range(len(cached))]
        assert policy.longest_prefix(names, lambda name, cached=cached: cached[name[0]], 8) == expected


def test_stages_have_the_groups_of_the_model_and_arrays_for_their_own_layers():
    layout = layout_of(W, W, F, W, W, F)
    stages = [layout.of_layers(layers) for layers in (range(3), range(3, 6))]
    assert all(stage.policies == layout.policies for stage in stages)
    assert [group.layers for group in stages[0].groups] == [(2,), (0,), (1,)]
    assert [group.layers for group in stages[1].groups] == [(5,), (3,), (4,)]
    for stage, layers in zip(stages, (range(3), range(3, 6)), strict=True):
        assert [stage.places[layer].arrays for layer in layers] == [(0, 1)] * 3
        assert len(stage.arrays) == 2 and 2 * stage.block_bytes == layout.block_bytes
    assert stages[0].num_blocks_for(100) == layout.num_blocks_for(100)


def test_a_stage_without_layers_in_blocks_has_no_arrays():
    state = RowState((StateArray(2, (3,), "float32"), StateArray(2, (3, 3), "float32")))
    layout = layout_of(state, F, state)
    first, last = layout.of_layers(range(1)), layout.of_layers(range(1, 3))
    assert (first.arrays, first.block_bytes, first.policies) == ((), 0, layout.policies)
    assert [place.arrays for place in first.places] == [(0, 1), (), ()]
    assert [place.arrays for place in last.places] == [(), (0, 1), (2, 3)]
    assert first.row_bytes == last.row_bytes == layout.row_bytes // 2
