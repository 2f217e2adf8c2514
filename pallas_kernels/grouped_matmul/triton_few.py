"""The experts of few tokens as two Pallas-Triton kernels, which read each chosen expert's weights once and nothing else.

    gate and up   program: items (chosen expert, part of F) in turns
                           x[T, D] @ gate_up[expert, :, part, D].T, activation, routing weight  -> h[place of the expert, T, part]
    down          program (part of D, share of the terms): sum over experts and F of
                           h[place, T, F] @ down[expert, part, F].T                             -> partial sums [share, T, part]

A tile has a row per token; rows of tokens that did not choose the expert are 0. Padding makes the tokens of a step a multiple of 8,
so most may choose nothing: programs of the first kernel number the chosen experts themselves, and share out what there is. The
routing weight multiplies the hidden values, so the second kernel is one long product, cut into shares that keep all cores reading.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, num_cores, store, triton_call
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.tiles import Kind, Tiles, fitted, products_of_rows
from pallas_kernels.sizes import next_power_of_two

MAX_TOKENS = 16
"""The rows of the smallest tile that tensor cores multiply."""
MAX_PAIRS = 128
"""Pairs of token and choice, all of which a program compares with each other."""


@dataclass(frozen=True)
class FewTiling:
    """Tiles of both kernels (their block_m is MAX_TOKENS), and how many programs share the work."""

    gate_up: Tiles
    down: Tiles
    programs_of_core: int = 2
    """Of the first kernel."""
    num_shares: int = 4
    """Of the terms of the second kernel's sums."""


def takes_few(num_tokens: int, num_choices: int) -> bool:
    return num_tokens <= MAX_TOKENS and num_tokens * num_choices <= MAX_PAIRS


def pick_few_tiling(itemsize: int) -> FewTiling:
    """Small tiles and many stages: what counts is the bytes that are being read."""
    if itemsize == 4:  # multiplied in full precision without tensor cores
        tiles = Tiles(MAX_TOKENS, 32, 32, num_stages=2)
        return FewTiling(tiles, tiles)
    # In the second kernel the number of the expert is loaded first, which takes half of the stages.
    gate_up, down = Tiles(MAX_TOKENS, 32, 128, num_stages=4), Tiles(MAX_TOKENS, 64, 128, num_stages=9)
    return FewTiling(fitted(gate_up, 2, itemsize), fitted(down, 1, itemsize))


def experts_of_few(
    x_TD: jax.Array,
    expert_P: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: Any,
    down_EDF: Any,
    gate_up_bias_E2F: jax.Array | None,
    down_bias_ED: jax.Array | None,
    *,
    activation: str,
    kind: Kind,
    tiling: FewTiling,
    interpret: bool,
) -> jax.Array:
    """[T, D]. expert_P: this device's expert of each pair; that of a pair without one is outside of [0, E)."""
    num_experts, width, hidden = down_EDF.shape
    num_tokens, num_choices = weight_Tk.shape
    num_items = min(len(expert_P), num_experts)
    weight_P = weight_Tk.reshape(-1)
    gate_up, down = kind.arrays(gate_up_E2FD), kind.arrays(down_EDF)
    num_arrays = len(gate_up)

    def call(kernel: Callable[..., None], name: str, tiles: Tiles, grid: tuple[int, ...], out: Any, *args: Any) -> Any:
        return triton_call(
            functools.partial(kernel, kind=kind, num_arrays=num_arrays, tiles=tiles),
            name=f"few_{kind.prefix}_{name}",
            grid=grid,
            out_shape=out,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            interpret=interpret,
        )(*args)

    tiles, biases = tiling.gate_up, [] if gate_up_bias_E2F is None else [gate_up_bias_E2F]
    num_programs = min(num_items * pl.cdiv(hidden, tiles.block_n), tiling.programs_of_core * num_cores())
    hidden_NTF, item_2N, num_items_1 = call(
        functools.partial(_gate_up_kernel, activation=activation, num_choices=num_choices),
        "gate_up",
        tiles,
        (num_programs,),
        (
            jax.ShapeDtypeStruct((num_items, num_tokens, hidden), x_TD.dtype),
            jax.ShapeDtypeStruct((2, num_items), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        *(expert_P, weight_P, x_TD, *gate_up, *biases),
    )
    tiles, biases = tiling.down, [] if down_bias_ED is None else [expert_P, weight_P, down_bias_ED]
    sum_STD = call(
        _down_kernel,
        "down",
        tiles,
        (pl.cdiv(width, tiles.block_n), tiling.num_shares),
        jax.ShapeDtypeStruct((tiling.num_shares, num_tokens, width), jnp.float32),
        *(item_2N, num_items_1, hidden_NTF, *down, *biases),
    )
    return jnp.sum(sum_STD, axis=0).astype(x_TD.dtype)


def _gate_up_kernel(
    expert_ref: Any,  # [P]
    weight_ref: Any,  # [P]
    x_ref: Any,  # [T, D]
    # gate_up [E, 2, F, D]; bias [E, 2, F] if there is one; hidden [N, T, F], expert and bits of its tokens [2, N], number of these [1]
    *refs: Any,
    kind: Kind,
    num_arrays: int,
    tiles: Tiles,
    activation: str,
    num_choices: int,
) -> None:
    weight_refs, (*bias_ref, hidden_ref, item_ref, num_items_ref) = refs[:num_arrays], refs[num_arrays:]
    num_pairs, num_experts, num_columns = expert_ref.shape[0], weight_refs[0].shape[0], hidden_ref.shape[2]
    num_blocks = pl.cdiv(num_columns, tiles.block_n)
    index_P = jnp.arange(max(2, next_power_of_two(num_pairs)))
    expert_P = load(expert_ref.at[index_P], mask=index_P < num_pairs, other=-1)
    weight_P = load(weight_ref.at[index_P], mask=index_P < num_pairs, other=0.0)
    is_before_PP = (expert_P[None, :] == expert_P[:, None]) & (index_P[None, :] < index_P[:, None])
    is_first_P = (expert_P >= 0) & (expert_P < num_experts) & (jnp.sum(is_before_PP.astype(jnp.int32), axis=1) == 0)
    place_P = jnp.where(is_first_P, jnp.cumsum(is_first_P.astype(jnp.int32)) - 1, -1)
    num_items = jnp.sum(is_first_P.astype(jnp.int32))
    row_M = jnp.arange(tiles.block_m)
    is_own_MP = lax.div(index_P, num_choices)[None, :] == row_M[:, None]
    first, num_programs = pl.program_id(0), pl.num_programs(0)

    @pl.when(first == 0)
    def _():
        num_items_ref[0] = num_items

    @pl.loop(0, lax.div(num_items * num_blocks - first + (num_programs - 1), num_programs))
    def _(turn):
        index = first + turn * num_programs
        item, block = lax.div(index, num_blocks), lax.rem(index, num_blocks)
        expert = jnp.sum(jnp.where(place_P == item, expert_P, 0))
        is_chosen_MP = is_own_MP & (expert_P == expert)[None, :]
        is_row_M = jnp.sum(is_chosen_MP.astype(jnp.int32), axis=1) > 0
        first_column, matrices = block * tiles.block_n, [(expert, 0), (expert, 1)]
        column_N = first_column + jnp.arange(tiles.block_n)
        in_columns_N = column_N < num_columns
        sums = products_of_rows(kind, tiles, x_ref, row_M, is_row_M, weight_refs, matrices, first_column, num_columns)
        if bias_ref:
            sums = [
                sum_MN + load(bias_ref[0].at[expert, i, column_N], mask=in_columns_N, other=0.0).astype(jnp.float32)[None, :]
                for i, sum_MN in enumerate(sums)
            ]
        weight_M = jnp.sum(jnp.where(is_chosen_MP, weight_P[None, :], 0.0), axis=1)
        hidden_MN = ACTIVATIONS[activation](*sums) * weight_M[:, None]
        mask_MN = is_row_M[:, None] & in_columns_N[None, :]
        store(hidden_ref.at[item, row_M[:, None], column_N[None, :]], hidden_MN.astype(hidden_ref.dtype), mask=mask_MN)

        @pl.when(block == 0)
        def _():
            item_ref[0, item] = expert
            item_ref[1, item] = jnp.sum(jnp.where(is_row_M, 1 << row_M, 0))


def _down_kernel(
    item_ref: Any,  # [2, N]
    num_items_ref: Any,  # [1]
    hidden_ref: Any,  # [N, T, F]
    *refs: Any,  # down [E, D, F]; expert [P], weight [P] and bias [E, D] if there is one; partial sums [S, T, D]
    kind: Kind,
    num_arrays: int,
    tiles: Tiles,
) -> None:
    weight_refs, (*bias_refs, out_ref) = refs[:num_arrays], refs[num_arrays:]
    num_experts, num_terms, (num_shares, num_tokens, width) = weight_refs[0].shape[0], hidden_ref.shape[2], out_ref.shape
    share, first_column = pl.program_id(1), pl.program_id(0) * tiles.block_n
    column_N = first_column + jnp.arange(tiles.block_n)
    in_columns_N = column_N < width
    row_M = jnp.arange(tiles.block_m)
    steps_of_item = pl.cdiv(num_terms, tiles.block_k)
    num_steps = num_items_ref[0] * steps_of_item

    def at(i: jax.Array) -> Any:
        item, place = lax.div(i, steps_of_item), lax.rem(i, steps_of_item)
        expert, bits = item_ref[0, item], item_ref[1, item]
        is_row_M = (lax.shift_right_logical(jnp.broadcast_to(bits, row_M.shape), row_M) & 1) != 0

        def load_x(term_K: jax.Array) -> jax.Array:
            mask_MK = is_row_M[:, None] & (term_K < num_terms)[None, :]
            return load(hidden_ref.at[item, row_M[:, None], term_K[None, :]], mask=mask_MK, other=0.0)

        return place, [(expert,)], load_x

    begin, end = (lax.div(num_steps * part, num_shares) for part in (share, share + 1))
    (sum_MN,) = kind.products(tiles, (begin, end), at, weight_refs, 1, num_terms, first_column, width)
    is_row_M = row_M < num_tokens
    if bias_refs:
        sum_MN += _sum_of_biases(bias_refs, row_M, is_row_M & (share == 0), column_N, in_columns_N, num_tokens, num_experts)
    store(out_ref.at[share, row_M[:, None], column_N[None, :]], sum_MN, mask=is_row_M[:, None] & in_columns_N[None, :])


def _sum_of_biases(
    bias_refs: Sequence[Any],
    row_M: jax.Array,
    is_row_M: jax.Array,
    column_N: jax.Array,
    in_columns_N: jax.Array,
    num_tokens: int,
    num_experts: int,
) -> jax.Array:
    """float32 [M, N]: the chosen experts' biases times their routing weights."""
    expert_ref, weight_ref, bias_ref = bias_refs
    num_choices = expert_ref.shape[0] // num_tokens
    sum_MN = jnp.zeros((len(row_M), len(column_N)), jnp.float32)
    for choice in range(num_choices):
        pair_M = row_M * num_choices + choice
        expert_M = load(expert_ref.at[pair_M], mask=is_row_M, other=-1)
        is_here_M = (expert_M >= 0) & (expert_M < num_experts)
        weight_M = load(weight_ref.at[pair_M], mask=is_here_M, other=0.0)
        mask_MN = is_here_M[:, None] & in_columns_N[None, :]
        bias_MN = load(bias_ref.at[expert_M[:, None], column_N[None, :]], mask=mask_MN, other=0.0).astype(jnp.float32)
        sum_MN += weight_M[:, None] * bias_MN
    return sum_MN
