"""The plan for few tokens, by a Pallas-Triton kernel of one program: a tile for each chosen expert, with a row for every token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.grouped_matmul.triton_few import MAX_PAIRS
from pallas_kernels.grouped_matmul.triton_rows import SortedRows
from pallas_kernels.sizes import next_power_of_two


def tile_of_each_expert(
    x_TD: jax.Array, expert_P: jax.Array, num_experts: int, tile_rows: int, *, interpret: bool
) -> SortedRows:
    """Tiles of the chosen experts, in the order in which they are chosen first; each begins with the first of all rows of x.

    x_TD: no more rows than a tile. expert_P: this device's expert of each of MAX_PAIRS pairs at most, k to a token; that of a pair
    without one is outside of [0, E).
    """
    num_pairs = len(expert_P)
    num_tiles = min(num_pairs, num_experts)
    assert num_pairs <= MAX_PAIRS and len(x_TD) <= tile_rows, (
        f"{num_pairs} pairs of {len(x_TD)} tokens, {tile_rows} rows of a tile"
    )

    def ints(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    row_P, expert_N, start_N, count_N, num_tiles_1 = triton_call(
        functools.partial(_kernel, num_choices=num_pairs // len(x_TD), num_experts=num_experts, tile_rows=tile_rows),
        name="experts_of_few",
        grid=(1,),
        out_shape=(ints(num_pairs), ints(num_tiles), ints(num_tiles), ints(num_tiles), ints(1)),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(expert_P)
    rows = jnp.pad(x_TD, ((0, tile_rows - len(x_TD)), (0, 0)))
    return SortedRows(rows, row_P, expert_N, start_N, count_N, num_tiles_1[0])


def _kernel(
    expert_ref: Any,  # [P]
    row_ref: Any,  # [P]
    tile_expert_ref: Any,  # [N]
    start_ref: Any,  # [N]
    count_ref: Any,  # [N]
    num_tiles_ref: Any,  # [1]
    *,
    num_choices: int,
    num_experts: int,
    tile_rows: int,
) -> None:
    num_pairs, num_tiles = expert_ref.shape[0], tile_expert_ref.shape[0]
    index_P = jnp.arange(max(2, next_power_of_two(num_pairs)))
    expert_P = load(expert_ref.at[index_P], mask=index_P < num_pairs, other=-1)
    is_here_P = (expert_P >= 0) & (expert_P < num_experts)
    is_same_PP = (expert_P[None, :] == expert_P[:, None]) & is_here_P[None, :]
    num_before_P = jnp.sum((is_same_PP & (index_P[None, :] < index_P[:, None])).astype(jnp.int32), axis=1)
    is_first_P = is_here_P & (num_before_P == 0)
    # Of each pair: how many experts were chosen before its own was, which is its expert's tile.
    first_P = jnp.min(jnp.where(is_same_PP, index_P[None, :], len(index_P)), axis=1)
    is_first_PP = jnp.broadcast_to(is_first_P[None, :], is_same_PP.shape)
    tile_P = jnp.sum((is_first_PP & (index_P[None, :] < first_P[:, None])).astype(jnp.int32), axis=1)
    store(row_ref.at[index_P], tile_P * tile_rows + lax.div(index_P, num_choices), mask=is_here_P)
    # The interpreter writes back what is masked, so that must not have the place of another.
    store(tile_expert_ref.at[jnp.where(is_first_P, tile_P, num_tiles)], expert_P, mask=is_first_P)
    num_used = jnp.sum(is_first_P.astype(jnp.int32))
    is_tile_P, is_used_P = index_P < num_tiles, index_P < num_used
    store(start_ref.at[index_P], jnp.where(is_used_P, index_P * tile_rows, 0), mask=is_tile_P)
    store(count_ref.at[index_P], jnp.where(is_used_P, tile_rows, 0), mask=is_tile_P)
    num_tiles_ref[0] = num_used
