"""Paged decode attention with wide heads for Pallas-Triton: the keys of a row are split over several programs, as in
`paged_attention.triton_decode`; a program takes them in pieces of the head's width, which halves what it holds of a key at a time.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

from pallas_kernels._compat import dot_f32, load, num_cores, store, triton_call
from pallas_kernels.paged_attention.queries import in_parts
from pallas_kernels.paged_attention.triton_decode import LOG2E, MASKED, cap_scores, compute_type, kv_scale_operand
from pallas_kernels.sizes import next_power_of_two
from pallas_kernels.wide_attention.pieces import Pieces

MAX_LINES = 32
"""Query heads of a few queries that a program holds; more go in parts."""
MAX_SPLITS = 64
_COMBINED = Pieces(0, 128)
"""Pieces of the combination: MAX_SPLITS of them fit its registers."""


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the kernel."""

    num_splits: int
    block_k: int = 16
    num_warps: int = 4
    num_stages: int = 4
    piece: int = 256
    """Values of a piece of a head."""


def pick_tiles(
    num_rows: int, num_kv_heads: int, num_lines: int, itemsize: int, num_slots: int, window: int | None = None
) -> DecodeTiles:
    """Sizes for a shape. num_lines: query heads of a program. num_slots: width of the page table in tokens."""
    block_k = 16
    longest = num_slots if window is None else min(num_slots, window + block_k)
    # Of few rows most may be padding, which costs nothing: split as for a single one.
    num_pairs = num_kv_heads * (1 if num_rows <= 8 else num_rows)
    # A split below eight tiles costs more in the combination than it gains.
    num_splits = max(1, min(2 * num_cores() // num_pairs, longest // (8 * block_k), MAX_SPLITS))
    if itemsize > 2:  # full float32 products run without tensor cores and hold their operands in registers
        return DecodeTiles(num_splits, num_warps=8, num_stages=1, piece=64)
    return DecodeTiles(num_splits, num_warps=4 if num_lines <= 16 else 8)


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
    num_queries: int = 1,
    interpret: bool = False,
    tiles: DecodeTiles | None = None,
) -> jax.Array:
    """As `paged_attention.paged_decode`."""
    num_tokens, num_kv_heads, num_groups, head_dim = q_RKGH.shape
    num_lines = num_queries * num_groups
    if num_lines > MAX_LINES and num_queries > 1:
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        options |= {"interpret": interpret, "tiles": tiles, "num_queries": num_queries}
        most, pages = max(1, MAX_LINES // num_groups), (k_pages_PKSH, v_pages_PKSH)
        return in_parts(paged_decode, most, (q_RKGH,), pages, page_table_RB, kv_length_R, **options)
    num_rows = num_tokens // num_queries
    itemsize = compute_type(q_RKGH.dtype, k_pages_PKSH.dtype).itemsize
    num_slots = page_table_RB.shape[1] * k_pages_PKSH.shape[2]
    tiles = tiles or pick_tiles(num_rows, num_kv_heads, num_lines, itemsize, num_slots, window)
    splits = tiles.num_splits
    kernel = functools.partial(
        _kernel,
        num_queries=num_queries,
        tiles=tiles,
        score_scale=scale * LOG2E,
        soft_cap=None if soft_cap is None else soft_cap * LOG2E,
        window=window,
        has_kv_scale=k_scale is not None or v_scale is not None,
    )
    out_shape = jax.ShapeDtypeStruct(q_RKGH.shape, q_RKGH.dtype)
    sums = (
        jax.ShapeDtypeStruct((splits, *q_RKGH.shape), jnp.float32),
        jax.ShapeDtypeStruct((splits, *q_RKGH.shape[:-1]), jnp.float32),
    )
    result = triton_call(
        kernel,
        name="wide_decode",
        grid=(num_kv_heads, num_rows, splits),
        out_shape=out_shape if splits == 1 else sums,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_RKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, kv_length_R, *kv_scale_operand(k_scale, v_scale))
    if splits == 1:
        return result
    return triton_call(
        _combine_kernel,
        name="wide_decode_combine",
        grid=(num_kv_heads * num_groups, num_tokens, Pieces(head_dim, _COMBINED.width).count),
        out_shape=out_shape,
        num_warps=1 if splits <= 8 else 4,
        num_stages=1,
        interpret=interpret,
    )(*result)


def _kernel(
    q_ref,  # [R * W, K, G, H]
    k_ref,  # [P, K, S, H]
    v_ref,  # [P, K, S, H]
    table_ref,  # [R, B]
    length_ref,  # [R]
    *refs,  # scales [2] if there are any; out as q; or out [splits, R * W, K, G, H] float32, lse [splits, R * W, K, G] base 2
    has_kv_scale: bool,
    num_queries: int,
    tiles: DecodeTiles,
    score_scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    kv_scale_ref, *outs = refs if has_kv_scale else (None, *refs)
    if kv_scale_ref is not None:
        score_scale *= kv_scale_ref[0]
    num_groups, head_dim = q_ref.shape[2:]
    page_size, table_width = k_ref.shape[2], table_ref.shape[1]
    dtype = compute_type(q_ref.dtype, k_ref.dtype)
    pieces, block_k = Pieces(head_dim, tiles.piece), tiles.block_k
    head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length = length_ref[row]

    num_lines = num_queries * num_groups
    line_M = jnp.arange(max(16, next_power_of_two(num_lines)))
    query_M, group_M = lax.div(line_M, num_groups), lax.rem(line_M, num_groups)
    token_M = row * num_queries + query_M
    is_real_M1 = (line_M < num_lines)[:, None]
    # Of keys that a query of the row sees, each sees those before the end that is its own.
    end_M1 = (length - (num_queries - 1) + query_M)[:, None]

    first_position = 0 if window is None else jnp.maximum(length - (window + num_queries - 1), 0)
    end_tile = lax.div(length + (block_k - 1), block_k)
    first_tile = jnp.minimum(lax.div(first_position, block_k), end_tile)
    per_split = lax.div(end_tile - first_tile + (tiles.num_splits - 1), tiles.num_splits)
    begin = first_tile + split * per_split
    end = jnp.minimum(begin + per_split, end_tile)

    lines = token_M[:, None], head, group_M[:, None]
    q_pMH = [pieces.load(q_ref, piece, lines, is_real_M1).astype(dtype) for piece in range(pieces.count)]

    def body(tile, carry):
        *acc_pMH, max_M, sum_M = carry
        position_k = tile * block_k + jnp.arange(block_k)
        valid_k = position_k < length
        if window is not None:
            valid_k &= position_k >= first_position
        page_index_k = lax.div(position_k, page_size)
        if (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        slot = load(table_ref.at[row, page_index_k])[:, None], head, lax.rem(position_k, page_size)[:, None]
        # Lanes outside the row's own slots load nothing and give 0: what lies there may be NaN.
        valid_k1 = valid_k[:, None]
        scores_Mk = jnp.zeros((line_M.shape[0], block_k), jnp.float32)
        for piece, q_MH in enumerate(q_pMH):
            scores_Mk += dot_f32(q_MH, pieces.load(k_ref, piece, slot, valid_k1).astype(dtype).T)
        scores_Mk *= score_scale
        if soft_cap is not None:
            scores_Mk = cap_scores(scores_Mk, soft_cap)
        seen_Mk = valid_k[None, :]
        if num_queries > 1:
            seen_Mk &= position_k[None, :] < end_M1
            if window is not None:
                seen_Mk &= position_k[None, :] >= end_M1 - window
        scores_Mk = jnp.where(seen_Mk, scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        narrow_Mk = weights_Mk.astype(dtype)
        acc_pMH = [
            acc_MH * shrink_M[:, None] + dot_f32(narrow_Mk, pieces.load(v_ref, piece, slot, valid_k1).astype(dtype))
            for piece, acc_MH in enumerate(acc_pMH)
        ]
        return *acc_pMH, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    m = line_M.shape[0]
    empty = (jnp.zeros((m, tiles.piece), jnp.float32) for _ in q_pMH)
    *acc_pMH, max_M, sum_M = lax.fori_loop(
        begin, end, body, (*empty, jnp.full((m,), MASKED, jnp.float32), jnp.zeros((m,), jnp.float32))
    )
    safe_sum_M = jnp.where(sum_M == 0, 1.0, sum_M)
    factor_M1 = (1 / safe_sum_M)[:, None]
    if kv_scale_ref is not None:
        factor_M1 *= kv_scale_ref[1]
    out_ref, *lse_refs = outs
    in_split = () if tiles.num_splits == 1 else (split,)
    for piece, acc_MH in enumerate(acc_pMH):
        index, mask = pieces.at(piece, (*in_split, *lines), is_real_M1)
        store(out_ref.at[index], (acc_MH * factor_M1).astype(out_ref.dtype), mask=mask)
    for lse_ref in lse_refs:
        lse_M = jnp.where(sum_M == 0, MASKED, max_M + jnp.log2(safe_sum_M))
        store(lse_ref.at[split, token_M, head, group_M], lse_M, mask=line_M < num_lines)


def _combine_kernel(sums_ref, lse_ref, out_ref) -> None:
    """A piece of one query head of all splits, weighted by their share of the softmax's sum; a split without keys has weight 0."""
    num_splits, _, _, num_groups, head_dim = sums_ref.shape
    row = pl.program_id(1)
    head, group = lax.div(pl.program_id(0), num_groups), lax.rem(pl.program_id(0), num_groups)
    dim_H = pl.program_id(2) * _COMBINED.width + jnp.arange(_COMBINED.width)
    split_s = jnp.arange(max(2, next_power_of_two(num_splits)))
    is_split_s = split_s < num_splits
    lse_s = load(lse_ref.at[split_s, row, head, group], mask=is_split_s, other=MASKED)
    weight_s = jnp.exp2(lse_s - lse_s.max(axis=0))
    mask_sH = is_split_s[:, None] & (dim_H < head_dim)[None, :]
    sums_sH = load(sums_ref.at[split_s[:, None], row, head, group, dim_H[None, :]], mask=mask_sH, other=0.0)
    out_H = (sums_sH * weight_s[:, None]).sum(axis=0) / weight_s.sum(axis=0)
    store(out_ref.at[row, head, group, dim_H], out_H.astype(out_ref.dtype), mask=dim_H < head_dim)
