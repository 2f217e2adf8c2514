"""Rows of many tokens sorted by expert, and back, in Pallas-Triton kernels: what stands around the products of `mosaic_many`.

    count      program (block of pairs)     place of each pair among the block's of its expert; how many each expert has
    plan       program (block, tiles)       first row of each expert in the block; expert, first row and rows of each tile
    spread     program (token, part of D)   x[token] -> sorted rows of its choices
    sum        program (token, part of D)   weighted sum of its choices' results

An expert's rows begin at a multiple of the alignment. Rows between the experts' are not written.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.grouped_matmul.plan import max_tiles
from pallas_kernels.sizes import next_power_of_two

_FEW_PAIRS = 4096
"""Up to so many, programs that count compare 64 each."""
COLUMNS = 2048
"""Most columns of a program that moves rows."""
_COMPARED = 16384
"""Values compared at a time, in registers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SortedRows:
    """The tokens' rows by expert, and tiles of them."""

    x_SD: jax.Array
    row_P: jax.Array
    """int32 [P]: the row of each pair; undefined if it has no expert here."""
    expert_N: jax.Array
    """int32 [N]: the expert of each tile; E for a tile that is not used, these come last."""
    start_N: jax.Array
    """int32 [N]: its first row."""
    count_N: jax.Array
    """int32 [N]: its rows."""
    num_tiles: jax.Array
    """int32 []: tiles in use."""


def pick_block(num_pairs: int) -> int:
    """Pairs of a program that counts, which compares each with each: fewer take less time, but more programs have more counts to add up."""
    return 64 if num_pairs <= _FEW_PAIRS else 256


def sort_rows(
    x_TD: jax.Array, expert_P: jax.Array, num_experts: int, tile_rows: int, alignment: int, *, interpret: bool
) -> SortedRows:
    """expert_P: this device's expert of each pair, k to a token; that of a pair without one is outside of [0, E)."""
    (num_tokens, width), num_pairs = x_TD.shape, len(expert_P)
    block_size = pick_block(num_pairs)
    num_blocks = pl.cdiv(num_pairs, block_size)
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    num_rows = num_pairs + min(num_experts, num_pairs) * (alignment - 1)
    num_rows = max(tile_rows, pl.cdiv(num_rows, alignment) * alignment)  # the array itself has room for a tile

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    options: dict[str, Any] = {"num_stages": 1, "interpret": interpret}
    place_P, count_CE = triton_call(
        functools.partial(_count_kernel, block_size=block_size),
        name="experts_count",
        grid=(num_blocks,),
        out_shape=(ints(num_pairs), ints(num_blocks, num_experts)),
        num_warps=max(4, block_size // 32),
        **options,
    )(expert_P)
    first_CE, expert_N, start_N, count_N, num_tiles_1 = triton_call(
        functools.partial(_plan_kernel, tile_rows=tile_rows, alignment=alignment),
        name="experts_plan",
        grid=(num_blocks,),
        out_shape=(ints(num_blocks, num_experts), ints(num_tiles), ints(num_tiles), ints(num_tiles), ints(1)),
        num_warps=4,
        **options,
    )(count_CE)
    columns = min(COLUMNS, next_power_of_two(width))
    x_SD, row_P = triton_call(
        functools.partial(_spread_kernel, block_size=block_size, columns=columns),
        name="experts_spread",
        grid=(num_tokens, pl.cdiv(width, columns)),
        out_shape=(jax.ShapeDtypeStruct((num_rows, width), x_TD.dtype), ints(num_pairs)),
        num_warps=4,
        **options,
    )(x_TD, expert_P, place_P, first_CE)
    return SortedRows(x_SD, row_P, expert_N, start_N, count_N, num_tiles_1[0])


def sum_rows(
    out_SD: jax.Array, row_P: jax.Array, expert_P: jax.Array, weight_Tk: jax.Array, num_experts: int, *, interpret: bool
) -> jax.Array:
    """[T, D]: the weighted sum of each token's rows, in float32."""
    num_tokens, width = len(weight_Tk), out_SD.shape[1]
    columns = min(COLUMNS // 2, next_power_of_two(width))
    return triton_call(
        functools.partial(_sum_kernel, columns=columns, num_experts=num_experts),
        name="experts_sum",
        grid=(num_tokens, pl.cdiv(width, columns)),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), out_SD.dtype),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(out_SD, row_P, expert_P, weight_Tk)


def _count_kernel(
    expert_ref: Any,  # [P]
    place_ref: Any,  # [P]
    count_ref: Any,  # [C, E]
    *,
    block_size: int,
) -> None:
    block = pl.program_id(0)
    num_pairs, num_experts = expert_ref.shape[0], count_ref.shape[1]
    index_B = block * block_size + jnp.arange(block_size)
    expert_B = load(expert_ref.at[index_B], mask=index_B < num_pairs, other=-1)
    id_E = jnp.arange(max(2, next_power_of_two(num_experts)))
    part = max(1, min(block_size, _COMPARED // max(block_size, len(id_E))))

    def add_part(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place_B, count_E = sums
        index_Q = block * block_size + i * part + jnp.arange(part)
        expert_Q = load(expert_ref.at[index_Q], mask=index_Q < num_pairs, other=-1)
        is_before_BQ = (expert_Q[None, :] == expert_B[:, None]) & (index_Q[None, :] < index_B[:, None])
        place_B += jnp.sum(is_before_BQ.astype(jnp.int32), axis=1)
        count_E += jnp.sum((expert_Q[:, None] == id_E[None, :]).astype(jnp.int32), axis=0)
        return place_B, count_E

    zeros = jnp.zeros(block_size, jnp.int32), jnp.zeros(len(id_E), jnp.int32)
    place_B, count_E = lax.fori_loop(0, block_size // part, add_part, zeros)
    store(place_ref.at[index_B], place_B, mask=index_B < num_pairs)
    store(count_ref.at[block, id_E], count_E, mask=id_E < num_experts)


def _plan_kernel(
    count_ref: Any,  # [C, E]
    first_ref: Any,  # [C, E]: the row of an expert's first pair in each block
    expert_ref: Any,  # [N]
    start_ref: Any,  # [N]
    tile_count_ref: Any,  # [N]
    num_tiles_ref: Any,  # [1]
    *,
    tile_rows: int,
    alignment: int,
) -> None:
    block = pl.program_id(0)
    (num_blocks, num_experts), num_tiles = count_ref.shape, expert_ref.shape[0]
    id_E = jnp.arange(max(2, next_power_of_two(num_experts)))
    is_expert_E = id_E < num_experts
    part = max(1, min(next_power_of_two(num_blocks), _COMPARED // 2 // len(id_E)))

    def add_part(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before_E, total_E = sums
        index_Q1 = (i * part + jnp.arange(part))[:, None]
        count_QE = load(count_ref.at[index_Q1, id_E[None, :]], mask=(index_Q1 < num_blocks) & is_expert_E[None, :], other=0)
        return before_E + jnp.sum(jnp.where(index_Q1 < block, count_QE, 0), axis=0), total_E + jnp.sum(count_QE, axis=0)

    zeros = jnp.zeros(len(id_E), jnp.int32)
    before_E, total_E = lax.fori_loop(0, pl.cdiv(num_blocks, part), add_part, (zeros, zeros))
    aligned_E = lax.div(total_E + (alignment - 1), alignment) * alignment
    tiles_E = lax.div(total_E + (tile_rows - 1), tile_rows)
    start_E, end_tile_E = jnp.cumsum(aligned_E) - aligned_E, jnp.cumsum(tiles_E)
    store(first_ref.at[block, id_E], start_E + before_E, mask=is_expert_E)

    # This program's share of the tiles, a few at a time.
    share = pl.cdiv(num_tiles, num_blocks)
    few = max(1, min(next_power_of_two(share), _COMPARED // 4 // len(id_E)))

    @pl.loop(0, pl.cdiv(share, few))
    def _(i):
        place_Q = i * few + jnp.arange(few)
        tile_Q = block * share + place_Q
        expert_Q = jnp.sum(((tile_Q[:, None] >= end_tile_E[None, :]) & is_expert_E[None, :]).astype(jnp.int32), axis=1)

        def of_expert(x_E: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(id_E[None, :] == expert_Q[:, None], x_E[None, :], 0), axis=1)

        offset_Q = (tile_Q - of_expert(end_tile_E - tiles_E)) * tile_rows
        count_Q = jnp.minimum(of_expert(total_E) - offset_Q, tile_rows)
        is_used_Q = expert_Q < num_experts
        mask_Q = (place_Q < share) & (tile_Q < num_tiles)
        store(expert_ref.at[tile_Q], expert_Q, mask=mask_Q)
        store(start_ref.at[tile_Q], jnp.where(is_used_Q, of_expert(start_E) + offset_Q, 0), mask=mask_Q)
        store(tile_count_ref.at[tile_Q], jnp.where(is_used_Q, count_Q, 0), mask=mask_Q)

    @pl.when(block == 0)
    def _():
        num_tiles_ref[0] = jnp.sum(tiles_E)


def _spread_kernel(
    x_ref: Any,  # [T, D]
    expert_ref: Any,  # [P]
    place_ref: Any,  # [P]
    first_ref: Any,  # [C, E]
    out_ref: Any,  # [S, D]
    row_ref: Any,  # [P]
    *,
    block_size: int,
    columns: int,
) -> None:
    token, part = pl.program_id(0), pl.program_id(1)
    (num_tokens, width), num_experts = x_ref.shape, first_ref.shape[1]
    num_choices = expert_ref.shape[0] // num_tokens
    column_N = part * columns + jnp.arange(columns)
    in_columns_N = column_N < width
    x_N = load(x_ref.at[token, column_N], mask=in_columns_N, other=0.0)
    for choice in range(num_choices):
        pair = token * num_choices + choice
        expert = expert_ref[pair]

        @pl.when((expert >= 0) & (expert < num_experts))
        def _(pair=pair, expert=expert):
            row = first_ref[lax.div(pair, block_size), expert] + place_ref[pair]
            store(out_ref.at[row, column_N], x_N, mask=in_columns_N)

            @pl.when(part == 0)
            def _():
                row_ref[pair] = row


def _sum_kernel(
    rows_ref: Any,  # [S, D]
    row_ref: Any,  # [P]
    expert_ref: Any,  # [P]
    weight_ref: Any,  # [T, k]
    out_ref: Any,  # [T, D]
    *,
    columns: int,
    num_experts: int,
) -> None:
    token = pl.program_id(0)
    (_, width), num_choices = rows_ref.shape, weight_ref.shape[1]
    column_N = pl.program_id(1) * columns + jnp.arange(columns)
    in_columns_N = column_N < width
    sum_N = jnp.zeros(columns, jnp.float32)
    for choice in range(num_choices):
        pair = token * num_choices + choice
        expert = expert_ref[pair]
        is_here = (expert >= 0) & (expert < num_experts)
        row = jnp.where(is_here, row_ref[pair], 0)
        weight = jnp.where(is_here, weight_ref[token, choice], 0.0)
        value_N = load(rows_ref.at[row, column_N], mask=in_columns_N & is_here, other=0.0)
        sum_N += weight * value_N.astype(jnp.float32)
    store(out_ref.at[token, column_N], sum_N.astype(out_ref.dtype), mask=in_columns_N)
