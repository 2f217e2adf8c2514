"""Paged attention in plain float32 jnp: the truth for the other implementations. Gathers the whole page table."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.cache_write.bits import as_values
from pallas_kernels.paged_attention.parts import NO_KEYS, Part

MASKED = -1e30  # a finite score: a row without any valid position must give zeros, not NaN


def supports(**_: object) -> bool:
    return True


def paged_attention(
    q_TKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks_KG: jax.Array | None = None,
    part: Part | None = None,
    interpret: bool = False,
) -> Any:
    num_tokens, num_rows = q_TKGH.shape[0], page_table_RB.shape[0]
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(query_start_R1[None, 1:] <= token_T[:, None], axis=1)  # num_rows for padding tokens
    owned_T = row_T < num_rows
    row_T = jnp.minimum(row_T, num_rows - 1)
    position_T = kv_length_R[row_T] - query_start_R1[row_T + 1] + token_T
    position_T = jnp.where(owned_T, position_T, -1)
    table_TB = page_table_RB[row_T]
    return _attend(
        q_TKGH, k_pages_PKSH, v_pages_PKSH, table_TB, position_T, scale, window, soft_cap, k_scale, v_scale, sinks_KG, part
    )


def paged_decode(
    q_RKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks_KG: jax.Array | None = None,
    num_queries: int = 1,
    part: Part | None = None,
    interpret: bool = False,
) -> Any:
    position_R = kv_length_R - 1
    if num_queries > 1:
        before_R = jnp.tile(num_queries - 1 - jnp.arange(num_queries, dtype=jnp.int32), len(kv_length_R))
        position_R = jnp.maximum(jnp.repeat(position_R, num_queries) - before_R, -1)
        page_table_RB = jnp.repeat(page_table_RB, num_queries, axis=0)
    return _attend(
        q_RKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, position_R, scale, window, soft_cap, k_scale, v_scale, sinks_KG, part
    )


def _attend(
    q_TKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_TB: jax.Array,
    position_T: jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    k_scale: ArrayLike | None,
    v_scale: ArrayLike | None,
    sinks_KG: jax.Array | None,
    part: Part | None,
) -> Any:
    """One query per table row, at the given position; position -1 sees nothing and gives zeros."""
    num_kv_heads, page_size, head_dim = k_pages_PKSH.shape[1:]
    num_tokens, num_slots = page_table_TB.shape[0], page_table_TB.shape[1] * page_size
    slot_L = jnp.arange(num_slots)
    # A cache of all keys is the only part.
    keys_before = (part or Part(0, 1)).keys_before
    valid_TL = slot_L[None] < keys_before(position_T + 1, page_size)[:, None]
    if window is not None:
        valid_TL &= slot_L[None] >= keys_before(position_T - window + 1, page_size)[:, None]

    read_TB = valid_TL.reshape(num_tokens, -1, page_size).any(axis=-1)

    def gather(pages_PKSH: jax.Array, stored_scale: ArrayLike | None) -> jax.Array:
        x_TBKSH = as_values(pages_PKSH[jnp.where(read_TB, page_table_TB, 0)])
        x_TKLH = x_TBKSH.swapaxes(1, 2).reshape(num_tokens, num_kv_heads, num_slots, head_dim)
        # Not a multiplication by zero: slots of others may hold NaN.
        x_TKLH = jnp.where(valid_TL[:, None, :, None], x_TKLH.astype(jnp.float32), 0.0)
        return x_TKLH if stored_scale is None else x_TKLH * stored_scale

    k_TKLH, v_TKLH = gather(k_pages_PKSH, k_scale), gather(v_pages_PKSH, v_scale)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgh,tklh->tkgl", q_TKGH.astype(jnp.float32), k_TKLH, precision=precision) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    valid = valid_TL[:, None, None]
    scores = jnp.where(valid, scores, MASKED)
    top = scores.max(-1, keepdims=True) if sinks_KG is None else jnp.maximum(scores.max(-1, keepdims=True), sinks_KG[..., None])
    weights = jnp.where(valid, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks_KG is not None:
        total += jnp.exp(sinks_KG[..., None] - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("tkgl,tklh->tkgh", weights, v_TKLH, precision=precision).astype(q_TKGH.dtype)
    if part is None:
        return out
    lse = (top + jnp.log(jnp.where(total == 0, 1.0, total)))[..., 0]
    return out, jnp.where(total[..., 0] == 0, NO_KEYS, lse)
