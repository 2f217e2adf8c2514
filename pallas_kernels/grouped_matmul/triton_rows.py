"""Rows of many tokens sorted by expert, and back, in Pallas-Triton kernels: what stands around the products of `mosaic_many`.

    count      program (block of pairs)     how many each expert has; only of many pairs
    plan       program (block, tiles)       row of each pair of the block; expert, first row and rows of each tile
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

_FEW_PAIRS = 1024
"""Up to so many, each program that plans counts them all."""
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


def sort_rows(
    x_TD: jax.Array, expert_P: jax.Array, num_experts: int, tile_rows: int, alignment: int, *, interpret: bool
) -> SortedRows:
    """expert_P: this device's expert of each pair, k to a token; that of a pair without one is outside of [0, E)."""
    (num_tokens, width), num_pairs = x_TD.shape, len(expert_P)
    block_size = 64 if num_pairs <= _FEW_PAIRS else 256
    num_blocks = pl.cdiv(num_pairs, block_size)
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    num_rows = num_pairs + min(num_experts, num_pairs) * (alignment - 1)
    num_rows = max(tile_rows, pl.cdiv(num_rows, alignment) * alignment)  # the array itself has room for a tile

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    options: dict[str, Any] = {"num_stages": 1, "interpret": interpret}
    counts: tuple[jax.Array, ...] = ()
    if num_pairs > _FEW_PAIRS:
        count_CE = triton_call(
            functools.partial(_count_kernel, block_size=block_size),
            name="experts_count",
            grid=(num_blocks,),
            out_shape=ints(num_blocks, num_experts),
            num_warps=4,
            **options,
        )(expert_P)
        counts = (count_CE,)
    row_P, expert_N, start_N, count_N, num_tiles_1 = triton_call(
        functools.partial(
            _plan_kernel, num_experts=num_experts, block_size=block_size, tile_rows=tile_rows, alignment=alignment
        ),
        name="experts_plan",
        grid=(num_blocks,),
        out_shape=(ints(num_pairs), ints(num_tiles), ints(num_tiles), ints(num_tiles), ints(1)),
        num_warps=max(4, block_size // 32),
        **options,
    )(expert_P, *counts)
    columns = min(COLUMNS, next_power_of_two(width))
    x_SD = triton_call(
        functools.partial(_spread_kernel, columns=columns, num_experts=num_experts),
        name="experts_spread",
        grid=(num_tokens, pl.cdiv(width, columns)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), x_TD.dtype),
        num_warps=4,
        **options,
    )(x_TD, expert_P, row_P)
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
    count_ref: Any,  # [C, E]
    *,
    block_size: int,
) -> None:
    block, num_experts = pl.program_id(0), count_ref.shape[1]
    id_E = _ids(num_experts)
    count_E, _ = _counted(expert_ref, id_E, block * block_size, block_size, jnp.int32(0))
    store(count_ref.at[block, id_E], count_E, mask=id_E < num_experts)


def _ids(num_experts: int) -> jax.Array:
    return jnp.arange(max(2, next_power_of_two(num_experts)))


def _counted(
    expert_ref: Any, id_E: jax.Array, first: int | jax.Array, num_pairs: int, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of these pairs each expert has, and how many of them before pair `end`."""
    part = max(1, min(next_power_of_two(num_pairs), _COMPARED // len(id_E)))
    num_all = expert_ref.shape[0]

    def add_part(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index_Q = first + i * part + jnp.arange(part)
        expert_Q = load(expert_ref.at[index_Q], mask=index_Q < jnp.minimum(first + num_pairs, num_all), other=-1)
        is_here_QE = expert_Q[:, None] == id_E[None, :]
        total_E, before_E = sums
        before_E += jnp.sum((is_here_QE & (index_Q < end)[:, None]).astype(jnp.int32), axis=0)
        return total_E + jnp.sum(is_here_QE.astype(jnp.int32), axis=0), before_E

    zeros = jnp.zeros(len(id_E), jnp.int32)
    return lax.fori_loop(0, pl.cdiv(num_pairs, part), add_part, (zeros, zeros))


def _added_up(count_ref: Any, id_E: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of all blocks' counts, and of those before a block."""
    num_blocks, num_experts = count_ref.shape
    part = max(1, min(next_power_of_two(num_blocks), _COMPARED // 2 // len(id_E)))

    def add_part(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total_E, before_E = sums
        index_Q1 = (i * part + jnp.arange(part))[:, None]
        is_there_QE = (index_Q1 < num_blocks) & (id_E < num_experts)[None, :]
        count_QE = load(count_ref.at[index_Q1, id_E[None, :]], mask=is_there_QE, other=0)
        return total_E + jnp.sum(count_QE, axis=0), before_E + jnp.sum(jnp.where(index_Q1 < block, count_QE, 0), axis=0)

    zeros = jnp.zeros(len(id_E), jnp.int32)
    return lax.fori_loop(0, pl.cdiv(num_blocks, part), add_part, (zeros, zeros))


def _plan_kernel(
    expert_ref: Any,  # [P]
    *refs: Any,  # of many pairs their counts [C, E]; then the outputs, see `SortedRows`: [P], [N], [N], [N], [1]
    num_experts: int,
    block_size: int,
    tile_rows: int,
    alignment: int,
) -> None:
    *counts, row_ref, tile_expert_ref, start_ref, tile_count_ref, num_tiles_ref = refs
    block, num_blocks, num_tiles = pl.program_id(0), pl.cdiv(expert_ref.shape[0], block_size), tile_expert_ref.shape[0]
    id_E = _ids(num_experts)
    is_expert_E = id_E < num_experts
    if counts:
        total_E, before_E = _added_up(counts[0], id_E, block)
    else:
        total_E, before_E = _counted(expert_ref, id_E, 0, expert_ref.shape[0], block * block_size)
        total_E = jnp.where(is_expert_E, total_E, 0)  # a pair may say that its expert is not here by any other number
    aligned_E = lax.div(total_E + (alignment - 1), alignment) * alignment
    tiles_E = lax.div(total_E + (tile_rows - 1), tile_rows)
    start_E, end_tile_E = jnp.cumsum(aligned_E) - aligned_E, jnp.cumsum(tiles_E)
    _place_pairs(expert_ref, row_ref, id_E, start_E + before_E, block * block_size, block_size)

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
        store(tile_expert_ref.at[tile_Q], expert_Q, mask=mask_Q)
        store(start_ref.at[tile_Q], jnp.where(is_used_Q, of_expert(start_E) + offset_Q, 0), mask=mask_Q)
        store(tile_count_ref.at[tile_Q], jnp.where(is_used_Q, count_Q, 0), mask=mask_Q)

    @pl.when(block == 0)
    def _():
        num_tiles_ref[0] = jnp.sum(tiles_E)


def _place_pairs(expert_ref: Any, row_ref: Any, id_E: jax.Array, first_E: jax.Array, begin: jax.Array, block_size: int) -> None:
    """Write the row of each pair of a block: behind the block's earlier pairs of the same expert."""
    num_pairs = expert_ref.shape[0]
    part = max(1, min(block_size, _COMPARED // max(block_size, len(id_E))))

    @pl.loop(0, block_size // part)
    def _(i):
        index_Q, index_B = begin + i * part + jnp.arange(part), begin + jnp.arange(block_size)
        expert_Q, expert_B = (load(expert_ref.at[each], mask=each < num_pairs, other=-1) for each in (index_Q, index_B))
        is_before_QB = (expert_Q[:, None] == expert_B[None, :]) & (index_B[None, :] < index_Q[:, None])
        first_Q = jnp.sum(jnp.where(expert_Q[:, None] == id_E[None, :], first_E[None, :], 0), axis=1)
        row_Q = first_Q + jnp.sum(is_before_QB.astype(jnp.int32), axis=1)
        store(row_ref.at[index_Q], row_Q, mask=index_Q < num_pairs)


def _spread_kernel(
    x_ref: Any,  # [T, D]
    expert_ref: Any,  # [P]
    row_ref: Any,  # [P]
    out_ref: Any,  # [S, D]
    *,
    columns: int,
    num_experts: int,
) -> None:
    token, part = pl.program_id(0), pl.program_id(1)
    num_tokens, width = x_ref.shape
    num_choices = expert_ref.shape[0] // num_tokens
    column_N = part * columns + jnp.arange(columns)
    in_columns_N = column_N < width
    x_N = load(x_ref.at[token, column_N], mask=in_columns_N, other=0.0)
    for choice in range(num_choices):
        pair = token * num_choices + choice
        expert = expert_ref[pair]

        @pl.when((expert >= 0) & (expert < num_experts))
        def _(pair=pair):
            store(out_ref.at[row_ref[pair], column_N], x_N, mask=in_columns_N)


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
