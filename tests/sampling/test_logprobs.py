from functools import partial

import jax
import numpy as np
import pytest

from jaxllm.sampling.columns import pack_columns, unpack_columns
from jaxllm.sampling.logprobs import named_logprobs, top_logprobs
from jaxllm.sampling.sampler import sample_full
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling_params import SamplingParams

# Operation by operation each of them would be dozens of programs.
top_logprobs, unpack_columns = jax.jit(top_logprobs, static_argnames=("k", "normalize")), jax.jit(unpack_columns)
R, V = 5, 60
rng = np.random.default_rng(0)
LOGITS = (rng.integers(-20, 20, (R, V)) / 4).astype(np.float32)
TOKEN = rng.integers(0, V, R).astype(np.int32)
EXACT = LOGITS.astype(np.float64)
LOGPROBS = EXACT - np.log(np.exp(EXACT).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("k", [0, 1, 7, V])
def test_the_token_comes_first_then_the_likeliest_in_order(k):
    ids, logprobs, rank = map(np.asarray, jax.jit(partial(top_logprobs, k=k))(LOGITS, TOKEN))
    assert ids.shape == logprobs.shape == (R, 1 + k) and ids.dtype == rank.dtype == np.int32
    np.testing.assert_array_equal(ids[:, 0], TOKEN)
    np.testing.assert_array_equal(ids[:, 1:], np.argsort(-LOGITS, axis=1, kind="stable")[:, :k])
    np.testing.assert_allclose(logprobs, np.take_along_axis(LOGPROBS, ids, axis=1), atol=1e-5)
    np.testing.assert_array_equal(rank, [(row >= row[token]).sum() for row, token in zip(LOGITS, TOKEN, strict=True)])


def test_minus_zero_and_zero_are_equals():
    logits = np.float32([[-1.0, -0.0, 0.0, -0.0, 0.0, 1.0]])
    ids, values, rank = jax.jit(partial(top_logprobs, k=5, normalize=False))(logits, np.int32([3]))
    assert ids.tolist() == [[3, 5, 1, 2, 3, 4]] and rank.tolist() == [5]
    np.testing.assert_array_equal(values, [[0, 1, 0, 0, 0, 0]])


def test_the_unique_likeliest_has_rank_1():
    logits = rng.normal(size=(R, V)).astype(np.float32)
    ids, _, rank = top_logprobs(logits, logits.argmax(axis=1), 1)
    np.testing.assert_array_equal(rank, 1)
    np.testing.assert_array_equal(ids[:, 0], ids[:, 1])


def test_named_tokens_are_scored_and_fill_comes_back_as_minus_inf():
    named = np.tile(np.array([4, 59, 4, -1], np.int32), (R, 1))
    ids, logprobs, rank = map(np.asarray, jax.jit(named_logprobs)(LOGITS, TOKEN, named))
    np.testing.assert_array_equal(ids, np.concatenate([TOKEN[:, None], named], axis=1))
    np.testing.assert_allclose(logprobs[:, 1:4], LOGPROBS[:, [4, 59, 4]], atol=1e-5)
    assert np.all(logprobs[:, 4] == -np.inf)
    np.testing.assert_array_equal(rank, top_logprobs(LOGITS, TOKEN, 0)[2])


def test_logits_are_reported_as_they_are():
    ids, values, _ = map(np.asarray, top_logprobs(LOGITS, TOKEN, 3, normalize=False))
    np.testing.assert_array_equal(values, np.take_along_axis(LOGITS, ids, axis=1))


def test_padded_columns_change_nothing():
    padded = np.pad(LOGITS, ((0, 0), (0, 4)), constant_values=-np.inf)
    for found, expected in zip(top_logprobs(padded, TOKEN, 20), top_logprobs(LOGITS, TOKEN, 20), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_processed_logprobs_are_a_distribution_over_the_kept_tokens():
    params = SamplingParams(temperature=0.5, top_k=6, seed=1)
    columns = unpack_columns(np.tile(pack_columns(params), (R, 1)))
    logits = rng.normal(size=(R, V)).astype(np.float32)
    state, row = SamplingState.zeros(1, V), np.zeros(R, np.int32)
    token, _, processed = jax.jit(sample_full)(logits, columns, np.arange(R), state, row)
    ids, logprobs, _ = map(np.asarray, top_logprobs(processed, token, V))
    np.testing.assert_allclose(np.exp(logprobs[:, 1:]).sum(axis=1), 1, rtol=1e-5)
    assert np.all(logprobs[:, 1:7] > -np.inf) and np.all(logprobs[:, 7:] == -np.inf)
    kept = np.take_along_axis(logits, ids[:, 1:7], axis=1).astype(np.float64) / 0.5
    np.testing.assert_allclose(logprobs[:, 1:7], kept - np.log(np.exp(kept).sum(axis=1, keepdims=True)), atol=1e-5)
    assert np.all(logprobs[:, 0] > -np.inf)
