"""Packed masks, against the plain loop over tokens, also where the vocabulary is spread over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.sampling.columns import pack_columns, unpack_columns
from jaxllm.sampling.mask import apply_mask, num_words
from jaxllm.sampling.sampler import sample_full, sample_random
from jaxllm.sampling.state import SamplingState, admit, pack_admission
from jaxllm.sampling_params import SamplingParams

unpack_columns = jax.jit(unpack_columns)  # operation by operation it would be dozens of programs


def masked(logits_RV, mask_RW):
    """One token after the other."""
    result = logits_RV.copy()
    for row, words in enumerate(mask_RW.view(np.uint32)):
        for token in range(result.shape[1]):
            if not int(words[token // 32]) >> token % 32 & 1:
                result[row, token] = -np.inf
    return result


def random_case(vocab_size, num_rows=3):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
    words = rng.integers(-(2**31), 2**31, size=(num_rows, num_words(vocab_size)), dtype=np.int64).astype(np.int32)
    return logits, words


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 128])
def test_a_mask_forbids_the_tokens_whose_bits_are_not_set(vocab_size):
    logits_RV, mask_RW = random_case(vocab_size)
    np.testing.assert_array_equal(jax.jit(apply_mask)(logits_RV, mask_RW), masked(logits_RV, mask_RW))


def test_the_same_over_several_devices():
    logits_RV, mask_RW = random_case(96)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    spread = jax.device_put(logits_RV, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    whole = jax.device_put(mask_RW, NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_array_equal(jax.jit(apply_mask)(spread, whole), masked(logits_RV, mask_RW))


def test_draws_after_a_mask_are_of_allowed_tokens():
    logits_RV, mask_RW = random_case(100, num_rows=64)
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=5)
    columns = unpack_columns(jnp.asarray(np.stack([pack_columns(params)] * 64)))
    allowed_RV = masked(logits_RV, mask_RW)
    tokens = np.asarray(jax.jit(sample_random)(jnp.asarray(allowed_RV), columns, jnp.arange(64)))
    assert np.isfinite(allowed_RV[np.arange(64), tokens]).all()


@pytest.mark.slow
def test_a_row_without_any_token_draws_minus_one_in_the_full_sampler():
    params = SamplingParams(temperature=0.7, seed=1, allowed_token_ids=[3, 4])
    columns = unpack_columns(jnp.asarray(np.stack([pack_columns(params)] * 2)))
    state, packed = SamplingState.zeros(3, 8), jnp.asarray(pack_admission(params, [1], 1, [], vocab_size=8))
    for row in range(2):
        state = jax.jit(admit)(state, jnp.int32(row), packed)
    mask_RW = np.array([[0b00000011], [0b00001000]], np.int32)
    logits_RV = apply_mask(jnp.ones((2, 8)), jnp.asarray(mask_RW))
    tokens, _, _ = jax.jit(sample_full)(logits_RV, columns, jnp.array([1, 1]), state, jnp.array([0, 1]))
    assert tokens.tolist() == [-1, 3]
