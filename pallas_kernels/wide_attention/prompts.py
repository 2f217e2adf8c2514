"""Causal paged attention over ragged batches with wide heads for Pallas-Triton: the rows of more than one token.

As in `paged_attention.triton_prefill` a program holds a tile of tokens, with the G query heads of a KV head, and walks their keys. Queries
and keys come in pieces of the head's width, whose products add up to the scores, and a program sums the values of some of the pieces:

    scores        queries 0 @ keys 0 + queries 1 @ keys 1
    program 0     softmax(scores) @ values 0
    program 1     softmax(scores) @ values 1         computes the same scores: the sums of all pieces would not fit its registers
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

from pallas_kernels._compat import dot_f32, load, store, triton_call
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles
from pallas_kernels.paged_attention.triton_decode import LOG2E, MASKED, cap_scores, compute_type, kv_scale_operand
from pallas_kernels.wide_attention.pieces import Pieces


@dataclass(frozen=True)
class PromptTiles:
    """Sizes; a tile holds block_m // G tokens."""

    block_m: int = 64
    block_k: int = 32
    num_warps: int = 8
    num_stages: int = 2
    piece: int = 256
    """Values of a piece of a head."""
    own_pieces: int = 1
    """Pieces whose values a program sums."""


def pick_tiles(num_groups: int, itemsize: int, cache_itemsize: int) -> PromptTiles:
    """Sizes for a shape."""
    if itemsize > 2:  # full float32 products run without tensor cores and hold their operands in registers
        return PromptTiles(block_m=max(16, num_groups), block_k=16, num_warps=4, num_stages=1, piece=64, own_pieces=1)
    # Conversion of 8 bits takes registers: fewer keys at a time.
    return PromptTiles(block_m=128, block_k=16) if cache_itemsize == 1 else PromptTiles()


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
    interpret: bool = False,
    tiles: PromptTiles | None = None,
    min_tokens: int = 1,
) -> jax.Array:
    """Rows of fewer than min_tokens tokens are left out: what the result holds in their place is undefined."""
    num_tokens, num_kv_heads, num_groups, head_dim = q_TKGH.shape
    cache_dtype = k_pages_PKSH.dtype
    tiles = tiles or pick_tiles(num_groups, compute_type(q_TKGH.dtype, cache_dtype).itemsize, cache_dtype.itemsize)
    table_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tiles.block_m // num_groups, min_tokens=min_tokens)
    pieces = Pieces(head_dim, tiles.piece)
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        score_scale=scale * LOG2E,
        soft_cap=None if soft_cap is None else soft_cap * LOG2E,
        window=window,
        has_kv_scale=k_scale is not None or v_scale is not None,
    )
    return triton_call(
        kernel,
        name="wide_attention",
        grid=(table_N4.shape[0], num_kv_heads, pl.cdiv(pieces.count, tiles.own_pieces)),
        out_shape=jax.ShapeDtypeStruct(q_TKGH.shape, q_TKGH.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, table_N4, *kv_scale_operand(k_scale, v_scale))


def _kernel(
    q_ref,  # [T, K, G, H]
    k_ref,  # [P, K, S, H]
    v_ref,  # [P, K, S, H]
    page_table_ref,  # [R, B]
    tiles_ref,  # [N, 4]
    *refs,  # scales [2] if there are any; out [T, K, G, H]
    tiles: PromptTiles,
    score_scale: float,
    soft_cap: float | None,
    window: int | None,
    has_kv_scale: bool,
) -> None:
    *kv_scale_refs, out_ref = refs
    if has_kv_scale:
        score_scale *= kv_scale_refs[0][0]
    num_groups, head_dim = q_ref.shape[2:]
    page_size, table_width = k_ref.shape[2], page_table_ref.shape[1]
    dtype = compute_type(q_ref.dtype, k_ref.dtype)
    pieces, block_m, block_k = Pieces(head_dim, tiles.piece), tiles.block_m, tiles.block_k
    head, first_piece = pl.program_id(1), pl.program_id(2) * tiles.own_pieces
    # From the last tile down: the tiles of a row that see the most keys start first, the small ones fill the end.
    tile = tiles_ref.shape[0] - 1 - pl.program_id(0)
    row = jnp.minimum(tiles_ref[tile, ROW], page_table_ref.shape[0] - 1)
    token, count, position = tiles_ref[tile, TOKEN], tiles_ref[tile, COUNT], tiles_ref[tile, POSITION]

    line_M = jnp.arange(block_m)
    token_M, group_M = lax.div(line_M, num_groups), lax.rem(line_M, num_groups)
    is_real_M1 = (token_M < count)[:, None]
    position_M1 = (position + token_M)[:, None]

    def queries(piece):
        return pieces.load(q_ref, piece, (token + token_M[:, None], head, group_M[:, None]), is_real_M1).astype(dtype)

    q_pMH = [queries(piece) for piece in range(pieces.count)]

    def body(index, carry, *, masked: bool):
        *acc_pMH, max_M, sum_M = carry
        position_k = index * block_k + jnp.arange(block_k)
        page_index_k = lax.div(position_k, page_size)
        if masked and (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        slot = load(page_table_ref.at[row, page_index_k])[:, None], head, lax.rem(position_k, page_size)[:, None]
        readable_k1 = None
        if masked:
            # Lanes past the tile's last key load nothing and give 0: what lies there may be NaN.
            readable_k1 = (position_k < position + count)[:, None]
            if window is not None:
                readable_k1 &= (position_k > position - window)[:, None]
        scores_Mk = jnp.zeros((block_m, block_k), jnp.float32)
        for piece, q_MH in enumerate(q_pMH):
            scores_Mk += dot_f32(q_MH, pieces.load(k_ref, piece, slot, readable_k1).astype(dtype).T)
        scores_Mk *= score_scale
        if soft_cap is not None:
            scores_Mk = cap_scores(scores_Mk, soft_cap)
        if masked:
            visible_Mk = position_k[None, :] <= position_M1
            if window is not None:
                visible_Mk &= position_k[None, :] > position_M1 - window
            scores_Mk = jnp.where(visible_Mk, scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        narrow_Mk = weights_Mk.astype(dtype)
        acc_pMH = [
            acc_MH * shrink_M[:, None]
            + dot_f32(narrow_Mk, pieces.load(v_ref, first_piece + own, slot, readable_k1).astype(dtype))
            for own, acc_MH in enumerate(acc_pMH)
        ]
        return *acc_pMH, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    carry = (
        *(jnp.zeros((block_m, tiles.piece), jnp.float32) for _ in range(tiles.own_pieces)),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    # Tiles without tokens, and padding (positions below zero), see no keys.
    end = lax.div(jnp.where(count > 0, jnp.maximum(position + count, 0), 0) + (block_k - 1), block_k)
    if window is None:
        whole = jnp.minimum(lax.div(jnp.maximum(position + 1, 0), block_k), end)
        carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
    else:
        whole = jnp.minimum(lax.div(jnp.maximum(position - (window - 1), 0), block_k), end)
    *acc_pMH, _, sum_M = lax.fori_loop(whole, end, functools.partial(body, masked=True), carry)
    factor_M1 = (1 / jnp.where(sum_M == 0, 1.0, sum_M))[:, None]
    if has_kv_scale:
        factor_M1 *= kv_scale_refs[0][1]
    for own, acc_MH in enumerate(acc_pMH):
        index, mask = pieces.at(first_piece + own, (token + token_M[:, None], head, group_M[:, None]), is_real_M1)
        store(out_ref.at[index], (acc_MH * factor_M1).astype(out_ref.dtype), mask=mask)
