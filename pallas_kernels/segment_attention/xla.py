"""Segment attention in plain JAX: chunks of queries over chunks of the keys that they see, with a running softmax.

Only the scores of one chunk of queries with one of keys exist at a time: 16 heads take 128 MiB.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.segment_attention.segments import bounds, tile_keys

QUERIES, KEYS = 1024, 2048
"""Of a chunk."""
MASKED = -1e30  # a finite score: a query may see nothing of a chunk


def segment_attention(
    q_PHd: jax.Array, k_PHd: jax.Array, v_PHd: jax.Array, segment_P: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    num_patches, num_heads, head_dim = q_PHd.shape
    dtype = q_PHd.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    num_queries, num_keys = min(QUERIES, num_patches), min(KEYS, num_patches)
    keys_N3 = tile_keys(*bounds(segment_P), num_queries)
    num_chunks = len(keys_N3)
    is_real_P11 = (segment_P >= 0)[:, None, None]
    # Whole chunks of both: queries and keys may begin a chunk anywhere up to its size before the end.
    padding = max(num_chunks * num_queries, -(-num_patches // num_keys) * num_keys) - num_patches
    q_HPd, k_HPd, v_HPd = (
        jnp.pad(jnp.where(is_real_P11, x, 0), ((0, padding), (0, 0), (0, 0))).swapaxes(0, 1) for x in (q_PHd, k_PHd, v_PHd)
    )
    segment_P = jnp.pad(segment_P, (0, padding), constant_values=-1)

    def attend(chunk: jax.Array) -> jax.Array:
        first = chunk * num_queries
        q_HMd = lax.dynamic_slice_in_dim(q_HPd, first, num_queries, 1)
        own_M = lax.dynamic_slice_in_dim(segment_P, first, num_queries)

        def add(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc_HMd, max_HM, sum_HM = carry
            k_Hkd, v_Hkd = (lax.dynamic_slice_in_dim(x, index * num_keys, num_keys, 1) for x in (k_HPd, v_HPd))
            segment_k = lax.dynamic_slice_in_dim(segment_P, index * num_keys, num_keys)
            scores_HMk = scale * jnp.einsum(
                "hmd,hkd->hmk", q_HMd, k_Hkd, precision=precision, preferred_element_type=jnp.float32
            )
            scores_HMk = jnp.where(own_M[:, None] == segment_k[None, :], scores_HMk, MASKED)
            new_max_HM = jnp.maximum(max_HM, scores_HMk.max(axis=2))
            weights_HMk = jnp.exp(scores_HMk - new_max_HM[:, :, None])
            shrink_HM = jnp.exp(max_HM - new_max_HM)
            added_HMd = jnp.einsum(
                "hmk,hkd->hmd", weights_HMk.astype(dtype), v_Hkd, precision=precision, preferred_element_type=jnp.float32
            )
            return (
                acc_HMd * shrink_HM[:, :, None] + added_HMd,
                new_max_HM,
                sum_HM * shrink_HM + weights_HMk.sum(axis=2),
            )

        carry = (
            jnp.zeros((num_heads, num_queries, head_dim), jnp.float32),
            jnp.full((num_heads, num_queries), MASKED, jnp.float32),
            jnp.zeros((num_heads, num_queries), jnp.float32),
        )
        start, end = keys_N3[chunk, 0], keys_N3[chunk, 1]
        acc_HMd, _, sum_HM = lax.fori_loop(start // num_keys, (end + num_keys - 1) // num_keys, add, carry)
        return (acc_HMd / jnp.where(sum_HM == 0, 1, sum_HM)[:, :, None]).astype(dtype)

    out_NHMd = lax.map(attend, jnp.arange(num_chunks, dtype=jnp.int32))
    out_PHd = out_NHMd.transpose(0, 2, 1, 3).reshape(-1, num_heads, head_dim)[:num_patches]
    return jnp.where(is_real_P11, out_PHd, 0)


def supports(*, platform: str, dtype: DTypeLike, head_dim: int, interpret: bool = False) -> bool:
    return True
