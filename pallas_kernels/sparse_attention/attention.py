"""Latent attention of each query to the vectors in given slots, in blocks of queries."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_write.bits import as_values

BLOCK_BYTES = 64 << 20
"""Of the vectors, scores and weights of a block, float32, or those of one query if these are more."""


def attend_to_slots(q_TNC: jax.Array, pages_P1SC: jax.Array, slot_TK: jax.Array, *, latent_dim: int, scale: float) -> jax.Array:
    """-> weighted sums of latents [T, N, L], computed in float32; zeros for a query without a slot.

    q_TNC: queries of latents (`absorb`), the rotated part behind them. latent_dim: L.
    """
    num_tokens, num_heads, width = q_TNC.shape
    query_bytes = 4 * slot_TK.shape[1] * (width + 2 * num_heads)
    block = min(num_tokens, 2 ** int(math.log2(max(1, BLOCK_BYTES // query_bytes))))
    vector_MC = pages_P1SC.reshape(-1, width)

    def of_block(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_tNC, slot_tK = operands
        is_there_tK1 = (slot_tK >= 0)[..., None]
        # What is not chosen may be NaN, which a weight of zero would not remove.
        vector_tKC = as_values(vector_MC.at[jnp.maximum(slot_tK, 0)].get(mode="clip"))
        vector_tKC = jnp.where(is_there_tK1, vector_tKC.astype(jnp.float32), 0.0)
        score_tKN = scale * _einsum("tnc,tkc->tkn", q_tNC.astype(jnp.float32), vector_tKC)
        score_tKN = jnp.where(is_there_tK1, score_tKN, -1e30)  # finite, so that a query without a slot gives no NaN
        weight_tKN = jnp.where(is_there_tK1, jax.nn.softmax(score_tKN, axis=1), 0.0)
        return _einsum("tkn,tkl->tnl", weight_tKN, vector_tKC[..., :latent_dim]).astype(q_tNC.dtype)

    if block == num_tokens:
        return of_block((q_TNC, slot_TK))
    padding = -num_tokens % block
    q_BtNC = jnp.pad(q_TNC, ((0, padding), (0, 0), (0, 0))).reshape(-1, block, num_heads, width)
    slot_BtK = jnp.pad(slot_TK, ((0, padding), (0, 0)), constant_values=-1).reshape(-1, block, slot_TK.shape[1])
    return lax.map(of_block, (q_BtNC, slot_BtK)).reshape(-1, num_heads, latent_dim)[:num_tokens]


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)
