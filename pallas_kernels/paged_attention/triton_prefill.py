"""Causal paged attention over ragged batches for Pallas-Triton: prefill, chunked continuations and decodes in one launch.

    tokens      0 ..... row 0 ..... | . row 1 . | .......... row 2 .......... | padding
    tiles       [----][----][--]      [--]        [----][----][----][----][-]   [----]       x  K heads
    rows of     token t, heads 0..G-1, token t+1, heads 0..G-1, ...            block_m = tokens x G query heads
    a tile

A program holds one tile (see tiles.py) for one KV head: the G query heads that share its keys are folded into its rows, so keys
are read once per tile. It walks the keys up to the tile's causal limit in tiles of block_k tokens, gathered through the page
table: first those that every query sees whole, without any mask, then those across the diagonal (FlashAttention-2, Dao 2023).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

from pallas_kernels._compat import dot_f32, load, store, triton_call
from pallas_kernels.paged_attention.parts import NO_KEYS, Part
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles
from pallas_kernels.paged_attention.triton_decode import (
    LOG2E,
    MASKED,
    cap_scores,
    compute_type,
    kv_scale_operand,
    optional_refs,
    rank_operand,
    sink_start,
)
from pallas_kernels.sizes import next_power_of_two


@dataclass(frozen=True)
class PrefillTiles:
    """Sizes of the prefill kernel; a tile holds block_m // G tokens."""

    block_m: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 5


def pick_tiles(num_tokens: int, num_groups: int, head_dim: int, itemsize: int) -> PrefillTiles:
    """Sizes for a shape."""
    padded_dim = next_power_of_two(head_dim)
    if itemsize > 2:  # full float32 products run without tensor cores and hold their operands in registers
        return PrefillTiles(
            block_m=max(16, next_power_of_two(num_groups)), block_k=32 if padded_dim < 128 else 16, num_warps=4, num_stages=2
        )
    if num_tokens * num_groups <= 64:
        return PrefillTiles(block_m=64, block_k=64 if padded_dim <= 128 else 32, num_warps=4)
    if padded_dim > 128:
        return PrefillTiles(block_m=64, block_k=64, num_warps=4, num_stages=3)
    return PrefillTiles()


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
    tiles: PrefillTiles | None = None,
    min_tokens: int = 1,
) -> Any:
    """Rows of fewer than min_tokens tokens are left out: what the result holds in their place is undefined."""
    num_tokens, num_kv_heads, num_groups, head_dim = q_TKGH.shape
    if tiles is None:
        itemsize = compute_type(q_TKGH.dtype, k_pages_PKSH.dtype).itemsize
        tiles = pick_tiles(num_tokens, num_groups, head_dim, itemsize)
    table_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tiles.block_m // num_groups, min_tokens=min_tokens)
    kernel = functools.partial(
        _prefill_kernel,
        block_m=tiles.block_m,
        block_k=tiles.block_k,
        score_scale=scale * LOG2E,
        soft_cap=None if soft_cap is None else soft_cap * LOG2E,
        window=window,
        has_kv_scale=k_scale is not None or v_scale is not None,
        has_sinks=sinks_KG is not None,
        num_parts=None if part is None else part.count,
    )
    optional = (*kv_scale_operand(k_scale, v_scale), *(() if sinks_KG is None else (sinks_KG,)), *rank_operand(part))
    out_shape = jax.ShapeDtypeStruct(q_TKGH.shape, q_TKGH.dtype)
    return triton_call(
        kernel,
        name="paged_attention",
        grid=(table_N4.shape[0], num_kv_heads),
        out_shape=out_shape if part is None else (out_shape, jax.ShapeDtypeStruct(q_TKGH.shape[:-1], jnp.float32)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, table_N4, *optional)


def _prefill_kernel(
    q_ref,  # [T, K, G, H]
    k_ref,  # [P, K, S, H]
    v_ref,  # [P, K, S, H]
    page_table_ref,  # [R, B]
    tiles_ref,  # [N, 4]
    *refs,  # see `optional_refs`, `rank_operand`; out [T, K, G, H]; of a part, lse [T, K, G]
    has_kv_scale: bool,
    has_sinks: bool,
    num_parts: int | None,
    block_m: int,
    block_k: int,
    score_scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    kv_scale_ref, sinks_ref, *others = optional_refs(refs, has_kv_scale, has_sinks)
    part = None if num_parts is None else Part(others.pop(0)[0], num_parts)
    out_ref, *lse_refs = others
    _, _, num_groups, head_dim = q_ref.shape
    page_size, table_width = k_ref.shape[2], page_table_ref.shape[1]
    num_rows = page_table_ref.shape[0]
    dtype = compute_type(q_ref.dtype, k_ref.dtype)
    if kv_scale_ref is not None:
        score_scale *= kv_scale_ref[0]
    head = pl.program_id(1)
    # From the last tile down: the tiles of a row that see the most keys start first, the small ones fill the end.
    tile = tiles_ref.shape[0] - 1 - pl.program_id(0)
    row = jnp.minimum(tiles_ref[tile, ROW], num_rows - 1)
    token, count, position = tiles_ref[tile, TOKEN], tiles_ref[tile, COUNT], tiles_ref[tile, POSITION]

    line_M = jnp.arange(block_m)
    token_M, group_M = lax.div(line_M, num_groups), lax.rem(line_M, num_groups)
    dim_H = jnp.arange(next_power_of_two(head_dim))
    in_dim_1H = (dim_H < head_dim)[None, :]
    q_mask_MH = (token_M < count)[:, None] & in_dim_1H
    q_index = (token + token_M[:, None], head, group_M[:, None], dim_H[None, :])
    q_MH = load(q_ref.at[q_index], mask=q_mask_MH, other=0.0).astype(dtype)
    position_M1 = (position + token_M)[:, None]
    first = None
    if part is not None:  # keys count by its slots
        end_M1 = part.keys_before(position_M1 + 1, page_size)
        first_M1 = None if window is None else part.keys_before(position_M1 - (window - 1), page_size)
        stop = part.keys_before(position + count, page_size)
        first = None if window is None else part.keys_before(position - (window - 1), page_size)

    def body(index, carry, *, masked: bool):
        acc_MH, max_M, sum_M = carry
        position_k = index * block_k + jnp.arange(block_k)
        page_index_k = lax.div(position_k, page_size)
        if masked and (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        page_k1 = load(page_table_ref.at[row, page_index_k])[:, None]
        offset_k1 = lax.rem(position_k, page_size)[:, None]
        mask_kH = None
        if masked:
            # Lanes past the tile's last key load nothing and give 0: what lies there may be NaN.
            readable_k1 = (position_k < (position + count if part is None else stop))[:, None]
            if window is not None:
                readable_k1 &= (position_k > position - window if part is None else position_k >= first)[:, None]
            mask_kH = jnp.broadcast_to(readable_k1 & in_dim_1H, (block_k, dim_H.shape[0]))
        elif head_dim != dim_H.shape[0]:
            mask_kH = jnp.broadcast_to(in_dim_1H, (block_k, dim_H.shape[0]))
        other = None if mask_kH is None else 0.0
        k_kH = load(k_ref.at[page_k1, head, offset_k1, dim_H[None, :]], mask=mask_kH, other=other).astype(dtype)
        scores_Mk = dot_f32(q_MH, k_kH.T) * score_scale
        if soft_cap is not None:
            scores_Mk = cap_scores(scores_Mk, soft_cap)
        if masked:
            visible_Mk = position_k[None, :] <= position_M1 if part is None else position_k[None, :] < end_M1
            if window is not None:
                visible_Mk &= position_k[None, :] > position_M1 - window if part is None else position_k[None, :] >= first_M1
            scores_Mk = jnp.where(visible_Mk, scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        v_kH = load(v_ref.at[page_k1, head, offset_k1, dim_H[None, :]], mask=mask_kH, other=other).astype(dtype)
        acc_MH = acc_MH * shrink_M[:, None] + dot_f32(weights_Mk.astype(dtype), v_kH)
        return acc_MH, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    carry = (
        jnp.zeros((block_m, dim_H.shape[0]), jnp.float32),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    if sinks_ref is not None:
        carry = (carry[0], *sink_start(sinks_ref, head, group_M, token_M < count))
    # Tiles without tokens, and padding (positions below zero), see no keys.
    end = lax.div(jnp.where(count > 0, jnp.maximum(position + count if part is None else stop, 0), 0) + (block_k - 1), block_k)
    if window is None:
        seen_by_all = position + 1 if part is None else part.keys_before(position + 1, page_size)
        whole = jnp.minimum(lax.div(jnp.maximum(seen_by_all, 0), block_k), end)
        carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
    else:
        whole = jnp.minimum(lax.div(jnp.maximum(position - (window - 1) if first is None else first, 0), block_k), end)
    acc_MH, max_M, sum_M = lax.fori_loop(whole, end, functools.partial(body, masked=True), carry)
    out_MH = acc_MH / jnp.where(sum_M == 0, 1.0, sum_M)[:, None]
    if kv_scale_ref is not None:
        out_MH *= kv_scale_ref[1]
    if part is not None:
        # Lines that see no key of the part have summed masked scores.
        has_keys_M1 = end_M1 > (0 if first_M1 is None else first_M1)
        out_MH = jnp.where(has_keys_M1, out_MH, 0.0)
        lse_M = (max_M + jnp.log2(jnp.where(sum_M == 0, 1.0, sum_M))) * math.log(2)
        (lse_ref,) = lse_refs
        lse_M = jnp.where(has_keys_M1[:, 0], lse_M, NO_KEYS)
        store(lse_ref.at[token + token_M, head, group_M], lse_M, mask=token_M < count)
    store(out_ref.at[q_index], out_MH.astype(out_ref.dtype), mask=q_mask_MH)
