"""Caches of the bits of narrow floats: the same numbers as caches of those floats, in plain JAX alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.cache_write.bits import bits_type
from pallas_kernels.paged_attention import paged_attention, paged_decode
from pallas_kernels.rope_cache_write import rope_and_write
from tests.pallas_kernels.test_paged_attention import Batch, make_arrays

pytestmark = pytest.mark.slow

BATCH = Batch(rows=((1, 1), (7, 7), (1, 40), (20, 33)))
SCALES = {"k_scale": jnp.float32(0.75), "v_scale": jnp.float32(3.0)}


def write_and_attend(q, k, v, table, query_start, kv_length, *, implementation: str, scales):
    num_tokens, num_heads, num_groups, head_dim = q.shape
    qkv = jnp.concatenate([q, q[:, :, :2]], axis=2)
    angles = jnp.arange(num_tokens * head_dim // 2, dtype=jnp.float32).reshape(num_tokens, head_dim // 2)
    # The first tokens of a page that each row owns, and one that is dropped.
    slots = jnp.where(jnp.arange(num_tokens) < 4, table[jnp.arange(num_tokens) % 4, 0] * k.shape[2], -1)
    _, k, v = rope_and_write(qkv, jnp.cos(angles), jnp.sin(angles), k, v, slots, implementation="xla", **scales)
    options = {**BATCH.options, **scales, "implementation": implementation}
    ragged = paged_attention(q, k, v, table, query_start, kv_length, **options)
    return k, v, ragged, paged_decode(q[: len(kv_length)], k, v, table, kv_length, **options)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", {}), ("float8_e4m3fn", SCALES)])
def test_bits_give_what_their_floats_give(dtype: str, scales, implementation: str) -> None:
    arrays = dict(make_arrays(BATCH))
    floats = arrays | {name: arrays[name].astype(dtype) for name in "kv"}
    bits = floats | {name: lax.bitcast_convert_type(floats[name], bits_type(dtype)) for name in "kv"}
    program = jax.jit(lambda values: write_and_attend(**values, implementation=implementation, scales=scales))
    *caches, ragged, decoded = program(floats)
    *stored, ragged_of_bits, decoded_of_bits = program(bits)
    for cache, one in zip(caches, stored, strict=True):
        assert one.dtype == bits_type(dtype) != jnp.dtype(dtype)
        np.testing.assert_array_equal(lax.bitcast_convert_type(cache, one.dtype), one)
    np.testing.assert_array_equal(ragged, ragged_of_bits)
    np.testing.assert_array_equal(decoded, decoded_of_bits)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_kernels_refuse_them(dtype: str) -> None:
    arrays = dict(make_arrays(BATCH))
    arrays |= {name: arrays[name].astype(dtype) for name in "kv"}
    with pytest.raises(ValueError, match=f"cache of {dtype}"):
        paged_attention(*arrays.values(), **BATCH.options, implementation="triton", interpret=True)
    q = arrays["q"]
    angles = jnp.ones((len(q), q.shape[-1] // 2))
    with pytest.raises(ValueError, match=f"values of {dtype}"):
        rope_and_write(
            q, angles, angles, arrays["k"], arrays["v"], jnp.zeros(len(q), jnp.int32), implementation="triton", interpret=True
        )
