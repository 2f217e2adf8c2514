"""The cache write: what it writes, what it leaves alone, and that donated caches are written in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import write_cache

SHAPE = (6, 3, 8, 16)  # pages, heads, slots, width


def make_case(num_tokens: int, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.normal(size=SHAPE), dtype) for _ in range(2))
    new_k, new_v = (jnp.asarray(rng.normal(size=(num_tokens, *SHAPE[1::2])), dtype) for _ in range(2))
    slot = rng.permutation(SHAPE[0] * SHAPE[2])[:num_tokens].astype(np.int32)
    return k, v, new_k, new_v, jnp.asarray(slot)


jit_write = jax.jit(write_cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_land_in_their_slots_and_nothing_else_changes(dtype: str) -> None:
    k, v, new_k, new_v, slot = make_case(11, dtype)
    slot = slot.at[jnp.array([2, 5])].set(jnp.array([-1, -100]))
    expected = [np.asarray(x, np.float32).copy() for x in (k, v)]
    for token, where in enumerate(np.asarray(slot)):
        if where >= 0:
            expected[0][where // SHAPE[2], :, where % SHAPE[2]] = np.asarray(new_k[token], np.float32)
            expected[1][where // SHAPE[2], :, where % SHAPE[2]] = np.asarray(new_v[token], np.float32)
    got = jit_write(k, v, new_k, new_v, slot)
    for one, right in zip(got, expected, strict=True):
        assert one.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(one, np.float32), right)


def test_only_padding_writes_nothing() -> None:
    k, v, new_k, new_v, slot = make_case(4, "float32")
    got_k, got_v = jit_write(k, v, new_k, new_v, slot * 0 - 1)
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)


def test_new_tokens_take_the_type_of_the_cache() -> None:
    k, v, new_k, new_v, slot = make_case(4, "float32")
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    got_k, _ = jit_write(k, v, new_k, new_v, slot)
    page, offset = slot // SHAPE[2], slot % SHAPE[2]
    np.testing.assert_array_equal(got_k[page, :, offset], new_k.astype(jnp.bfloat16))


def test_donated_caches_are_written_in_place() -> None:
    arrays = make_case(4, "float32")
    program = jax.jit(write_cache, donate_argnums=(0, 1)).lower(*arrays).compile()
    assert program.memory_analysis().alias_size_in_bytes == 2 * arrays[0].nbytes
    assert program.memory_analysis().temp_size_in_bytes < arrays[0].nbytes
