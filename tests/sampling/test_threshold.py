from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.sampling import threshold

R, V = 4, 50
search = {bits: jax.jit(partial(threshold._search, bits_per_pass=bits)) for bits in (1, 4)}  # on a CPU and on a GPU


def values_of_kind(kind, rng):
    if kind == "any float32":
        values = rng.integers(0, 2**32, (R, V), dtype=np.uint32).view(np.float32)
        return np.where(np.isnan(values) | (np.abs(values) < np.finfo(np.float32).tiny), -np.inf, values).astype(np.float32)
    if kind == "close":
        return np.nextafter(np.float32(1), np.float32(2)) * rng.integers(1, 3, (R, V)).astype(np.float32)
    values = rng.integers(-8, 9, (R, V)).astype(np.float32)
    return np.where(values < -5, -np.inf, values).astype(np.float32)


kinds = st.sampled_from(["any float32", "close", "ties"])
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("bits", [1, 4])
@settings(max_examples=200)
@given(kind=kinds, seed=seeds)
def test_the_kth_largest_value_is_found_exactly(bits, kind, seed):
    rng = np.random.default_rng(seed)
    values, k = values_of_kind(kind, rng), rng.choice([1, V, *range(1, V)], R).astype(np.int32)
    found = np.asarray(search[bits](values, np.ones((R, V), np.int32), k))
    expected = np.sort(values, axis=1)[:, ::-1][np.arange(R), k - 1]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bits", [1, 4])
@settings(max_examples=200)
@given(kind=kinds, seed=seeds)
def test_the_largest_value_whose_weight_reaches_the_target_is_found(bits, kind, seed):
    rng = np.random.default_rng(seed)
    values, weight = values_of_kind(kind, rng), rng.integers(0, 10, (R, V)).astype(np.int32)
    target = rng.integers(1, 300, R).astype(np.int32)
    found = np.asarray(search[bits](values, weight, target))
    for r in range(R):
        reaching = [value for value in values[r] if weight[r][values[r] >= value].sum() >= target[r]]
        assert found[r] == max(reaching, default=-np.inf)


def test_top_p_of_rows_without_finite_logits_keeps_everything():
    logits = np.full((R, V), -np.inf, np.float32)
    found = jax.jit(threshold.top_p_threshold)(logits, np.full(R, 0.5, np.float32), np.full(R, -np.inf, np.float32))
    np.testing.assert_array_equal(found, -np.inf)


def test_the_smallest_top_p_keeps_the_likeliest():
    logits = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32)
    tiny = np.full(R, 1e-45, np.float32)
    found = jax.jit(threshold.top_p_threshold)(logits, tiny, np.full(R, -np.inf, np.float32))
    np.testing.assert_array_equal(found, logits.max(axis=1))
