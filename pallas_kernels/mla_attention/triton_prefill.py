"""Causal latent attention over ragged batches for Pallas-Triton: prompts, their continuations in chunks, and single tokens.

    tokens      0 ..... row 0 ..... | . row 1 . | .......... row 2 .......... | padding
    tiles       [----][----][--]      [--]        [----][----][----][----][-]   [----]
    rows of     token t, heads 0..N-1, token t+1, heads 0..N-1, ...            block_m = tokens x heads
    a tile

A program holds one tile (see `paged_attention.tiles`). All heads share the keys, so they are folded into the tile's rows; more heads
than a tile has rows are split over programs. It walks the keys up to the tile's causal limit in tiles of block_k tokens: first those
that every query sees whole, without any mask, then those across the diagonal (FlashAttention-2, Dao 2023).
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import dot_f32, load, triton_call
from pallas_kernels.mla_attention.triton_decode import Part
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles
from pallas_kernels.paged_attention.triton_decode import LOG2E, MASKED, compute_type
from pallas_kernels.sizes import next_power_of_two


@dataclass(frozen=True)
class PrefillTiles:
    """Sizes of the prefill kernel: rows of a tile, each a token's head, and keys."""

    block_m: int = 64
    block_k: int = 32
    num_warps: int = 8
    num_stages: int = 2


def pick_tiles(itemsize: int) -> PrefillTiles:
    """Sizes for a type."""
    # Full float32 products run without tensor cores and hold their operands in registers.
    return PrefillTiles() if itemsize <= 2 else PrefillTiles(block_m=16, block_k=16, num_warps=8, num_stages=1)


def latent_attention(
    q_TNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    value_dim: int,
    scale: float,
    interpret: bool = False,
    tiles: PrefillTiles | None = None,
    min_tokens: int = 1,
) -> jax.Array:
    """Rows of fewer than min_tokens tokens are left out: what the result holds in their place is undefined."""
    num_tokens, num_heads, _ = q_TNC.shape
    if tiles is None:
        tiles = pick_tiles(compute_type(q_TNC.dtype, pages_P1SC.dtype).itemsize)
    # Heads of a token are neighbours in a tile; a power of two, so that tiles are full for most models.
    tile_heads = min(tiles.block_m, next_power_of_two(num_heads))
    table_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tiles.block_m // tile_heads, min_tokens=min_tokens)
    kernel = functools.partial(
        _prefill_kernel, block_m=tiles.block_m, tile_heads=tile_heads, block_k=tiles.block_k, score_scale=scale * LOG2E
    )
    return triton_call(
        kernel,
        name="latent_attention",
        grid=(-(-num_heads // tile_heads), table_N4.shape[0]),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, value_dim), q_TNC.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_TNC, pages_P1SC, page_table_RB, table_N4)


def _prefill_kernel(
    q_ref,  # [T, N, C]
    pages_ref,  # [P, 1, S, C]
    page_table_ref,  # [R, B]
    tiles_ref,  # [tiles, 4]
    out_ref,  # [T, N, V]
    *,
    block_m: int,
    tile_heads: int,
    block_k: int,
    score_scale: float,
) -> None:
    num_heads, width = q_ref.shape[1:]
    value_dim = out_ref.shape[-1]
    page_size, table_width = pages_ref.shape[2], page_table_ref.shape[1]
    num_rows = page_table_ref.shape[0]
    dtype = compute_type(q_ref.dtype, pages_ref.dtype)
    parts = [Part.of(0, value_dim), Part.of(value_dim, width)]
    # From the last tile down: the tiles of a row that see the most keys start first, the small ones fill the end.
    tile = tiles_ref.shape[0] - 1 - pl.program_id(1)
    row = jnp.minimum(tiles_ref[tile, ROW], num_rows - 1)
    token, count, position = tiles_ref[tile, TOKEN], tiles_ref[tile, COUNT], tiles_ref[tile, POSITION]

    line_M = jnp.arange(block_m)
    token_M, head_M = lax.div(line_M, tile_heads), pl.program_id(0) * tile_heads + lax.rem(line_M, tile_heads)
    is_used_M = (token_M < count) & (head_M < num_heads)
    place = ((token + token_M)[:, None], head_M[:, None])
    q_parts = [part.load(q_ref, place, is_used_M).astype(dtype) for part in parts]
    position_M1 = (position + token_M)[:, None]

    def body(index, carry, *, masked: bool):
        acc_MV, max_M, sum_M = carry
        position_k = index * block_k + jnp.arange(block_k)
        page_index_k = lax.div(position_k, page_size)
        if masked and (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        page_k1 = load(page_table_ref.at[row, page_index_k])[:, None]
        offset_k1 = lax.rem(position_k, page_size)[:, None]
        # Lanes past the tile's last key load nothing and give 0: what lies there may be NaN.
        is_read_k = position_k < position + count if masked else None
        latent_kV, rotated_kE = (part.load(pages_ref, (page_k1, 0, offset_k1), is_read_k).astype(dtype) for part in parts)
        scores_Mk = (dot_f32(q_parts[0], latent_kV.T) + dot_f32(q_parts[1], rotated_kE.T)) * score_scale
        if masked:
            scores_Mk = jnp.where(position_k[None, :] <= position_M1, scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        acc_MV = acc_MV * shrink_M[:, None] + dot_f32(weights_Mk.astype(dtype), latent_kV)
        return acc_MV, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    carry = (
        jnp.zeros((block_m, parts[0].padded), jnp.float32),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    # Tiles without tokens, and padding (positions below zero), see no keys.
    end = lax.div(jnp.where(count > 0, jnp.maximum(position + count, 0), 0) + (block_k - 1), block_k)
    whole = jnp.minimum(lax.div(jnp.maximum(position + 1, 0), block_k), end)
    carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
    acc_MV, _, sum_M = lax.fori_loop(whole, end, functools.partial(body, masked=True), carry)
    out_MV = acc_MV / jnp.where(sum_M == 0, 1.0, sum_M)[:, None]
    parts[0].store(out_ref, place, is_used_M, out_MV.astype(out_ref.dtype))
