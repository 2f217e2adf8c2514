"""Both products with weights of 4 bits as Pallas-Triton kernels, which widen them in registers: see `triton` for how they are split.

    [block_n, block_k] words -> values -> tensor cores (weights @ x.T, so that a tile of few tokens is narrow) -> [block_n, block_m]

Four words p, p + 1, ... of a block give four tiles of values, p, p + 8, ...; each is multiplied with those columns of x.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import dot_f32, inline_asm, load, store, triton_call
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, MAGNITUDES, PLACES, SCALE_BIAS, WORD, WORDS, Mxfp4
from pallas_kernels.grouped_matmul.plan import local_experts, make_plan, max_tiles, weighted_sum
from pallas_kernels.grouped_matmul.triton import (
    MAX_FEW_PAIRS,
    MAX_SUMMED_PAIRS,
    Tiles,
    Tiling,
    _for_pairs_of_expert,
    _for_tile,
    _tables,
)

SCALE_SHIFT = 63
"""Weights are computed as 2^-63 of their size, and sums multiplied by 2^63: then scales of 2^-62 to 2^64 are bfloat16 factors of
what a word's bits are."""

_BITS = (
    "and.b32 a, $1, 0x81C081C0;",
    "shl.b32 a, $1, 3; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 6; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 1; and.b32 a, a, 0x80008000;"
    "shr.b32 b, $1, 4; and.b32 b, b, 0x00C000C0; or.b32 a, a, b;"
    "shr.b32 b, $1, 5; and.b32 b, b, 0x01000100; or.b32 a, a, b;",
)
"""PTX that takes a value each out of two words, as bfloat16 of 2^-126 times its size. See `mxfp4`."""
_TIMES = "{{ .reg .b32 a, b; {} mov.b32 b, 0x80008000; fma.rn.bf16x2 $0, a, $2, b; }}"
"""The product with two factors. The addend is -0."""


def _widen(words: jax.Array, exponents: jax.Array, *, interpret: bool) -> list[jax.Array]:
    """bfloat16 [N, W] for each value of words uint16 [N, W], times 2^-63; exponents uint8 [W / 8, N]."""
    N, W = words.shape
    exponents = exponents.T
    bits = (exponents.astype(jnp.uint16) + SCALE_SHIFT) << 7
    if interpret:
        scale = jnp.ldexp(jnp.float32(1), exponents.astype(jnp.int32) - SCALE_BIAS - SCALE_SHIFT)
        scale = jnp.repeat(scale, WORDS, axis=1)
        found = []
        for places in PLACES:
            code = sum((words >> place & 1) << bit for bit, place in zip((2, 1, 0), places[1:], strict=True))
            value = sum(jnp.where(code == i, magnitude, 0.0) for i, magnitude in enumerate(MAGNITUDES))
            found.append((jnp.where(words >> places[0] & 1, -value, value) * scale).astype(jnp.bfloat16))
        return found
    factors = lax.bitcast_convert_type(bits, jnp.bfloat16)
    factors = jnp.broadcast_to(factors[:, :, None], (N, W // WORDS, WORDS)).reshape(N, W)
    result = [jax.ShapeDtypeStruct((N, W), jnp.bfloat16)]
    options = {"args": [words, factors], "constraints": "=r,r,r", "pack": 2, "result_shape_dtypes": result}
    return [inline_asm(_TIMES.format(bits), **options)[0] for bits in _BITS]


def experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: Mxfp4,
    down_EDF: Mxfp4,
    *,
    is_real_T: jax.Array | None = None,
    gate_up_bias_E2F: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    activation: str = "silu",
    first_expert: int | jax.Array = 0,
    interpret: bool = False,
    tiling: Tiling | None = None,
    max_few_pairs: int = MAX_FEW_PAIRS,
    max_summed_pairs: int = MAX_SUMMED_PAIRS,
) -> jax.Array:
    num_experts, width, hidden = down_EDF.shape
    num_tokens, num_choices = expert_Tk.shape
    num_pairs = num_tokens * num_choices
    tiling = tiling or pick_tiling(num_pairs, num_experts)
    block_m = tiling.gate_up.block_m
    assert block_m == tiling.down.block_m, f"{tiling} has two sizes of tiles of pairs"
    expert_P = local_experts(expert_Tk, is_real_T, first_expert, num_experts)
    find: Callable[..., None]
    if num_pairs <= max_few_pairs:
        find = functools.partial(_for_pairs_of_expert, num_experts=num_experts)
        tables, num_items = [expert_P], min(num_pairs, num_experts)
    else:
        plan = make_plan(expert_P, num_experts, block_m)
        find, tables, num_items = _for_tile, _tables(plan), max_tiles(num_pairs, num_experts, block_m)
    options: dict[str, Any] = {"find": find, "num_tables": len(tables), "interpret": interpret}

    def call(kernel: Callable[..., None], name: str, tiles: Tiles, columns: int, out: tuple[int, int], *args: Any) -> Any:
        return triton_call(
            functools.partial(kernel, tiles=tiles, **options),
            name=name,
            grid=(pl.cdiv(columns, tiles.block_n), num_items),
            out_shape=jax.ShapeDtypeStruct(out, x_TD.dtype),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            interpret=interpret,
        )(*tables, *args)

    gate_up = functools.partial(_gate_up_kernel, activation=activation, num_choices=num_choices)
    weights = gate_up_E2FD.words, gate_up_E2FD.exponents
    biases = [] if gate_up_bias_E2F is None else [gate_up_bias_E2F]
    hidden_PF = call(gate_up, "experts4_gate_up", tiling.gate_up, hidden, (num_pairs, hidden), x_TD, *weights, *biases)
    weights = down_EDF.words, down_EDF.exponents
    biases = [] if down_bias_ED is None else [down_bias_ED]
    if num_pairs <= min(max_summed_pairs, max_few_pairs):
        tiles = tiling.down
        return triton_call(
            functools.partial(_summed_down_kernel, tiles=tiles, num_experts=num_experts, interpret=interpret),
            name="experts4_down_sum",
            grid=(pl.cdiv(width, tiles.block_n),),
            out_shape=jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            interpret=interpret,
        )(expert_P, weight_Tk, hidden_PF, *weights, *biases)
    out_PD = call(_down_kernel, "experts4_down", tiling.down, width, (num_pairs, width), hidden_PF, *weights, *biases)
    return weighted_sum(out_PD, expert_P, weight_Tk, num_experts)


def pick_tiling(num_pairs: int, num_experts: int) -> Tiling:
    if num_pairs <= 8 * num_experts:
        return Tiling(Tiles(16, 64, 256, 4, 4), Tiles(16, 64, 256, 4, 4))
    return Tiling(Tiles(64, 64, 128, 4, 3), Tiles(64, 128, 128, 4, 3))


def _gate_up_kernel(
    *refs: Any, find: Any, num_tables: int, tiles: Tiles, activation: str, num_choices: int, interpret: bool
) -> None:
    # x [T, D]; words [E, 2, F, D / 4] and exponents [E, 2, D / 32, F] of gate_up; bias [E, 2, F] if there is one; out [P, F]
    tables, (x_ref, words_ref, exponents_ref, *bias_ref, out_ref) = refs[:num_tables], refs[num_tables:]
    column_N = pl.program_id(0) * tiles.block_n + jnp.arange(tiles.block_n)
    in_columns_N = column_N < out_ref.shape[1]

    def do_tile(expert: jax.Array, pair_M: jax.Array, is_pair_M: jax.Array) -> None:
        token_M = lax.div(pair_M, num_choices)
        matrices = [(expert, 0), (expert, 1)]
        sums = _products(
            tiles, x_ref, token_M, is_pair_M, words_ref, exponents_ref, matrices, column_N, in_columns_N, interpret=interpret
        )
        if bias_ref:
            sums = [
                sum_NM + load(bias_ref[0].at[expert, i, column_N], mask=in_columns_N, other=0.0).astype(jnp.float32)[:, None]
                for i, sum_NM in enumerate(sums)
            ]
        mask_NM = in_columns_N[:, None] & is_pair_M[None, :]
        values = ACTIVATIONS[activation](*sums).astype(out_ref.dtype)
        store(out_ref.at[pair_M[None, :], column_N[:, None]], values, mask=mask_NM)

    find(*tables, pl.program_id(1), tiles.block_m, do_tile)


def _down_kernel(*refs: Any, find: Any, num_tables: int, tiles: Tiles, interpret: bool) -> None:
    # h [P, F]; words [E, D, F / 4] and exponents [E, F / 32, D] of down; bias [E, D] if there is one; out [P, D]
    tables, (x_ref, words_ref, exponents_ref, *bias_ref, out_ref) = refs[:num_tables], refs[num_tables:]
    column_N = pl.program_id(0) * tiles.block_n + jnp.arange(tiles.block_n)
    in_columns_N = column_N < out_ref.shape[1]

    def do_tile(expert: jax.Array, pair_M: jax.Array, is_pair_M: jax.Array) -> None:
        (sum_NM,) = _products(
            tiles, x_ref, pair_M, is_pair_M, words_ref, exponents_ref, [(expert,)], column_N, in_columns_N, interpret=interpret
        )
        if bias_ref:
            sum_NM += load(bias_ref[0].at[expert, column_N], mask=in_columns_N, other=0.0).astype(jnp.float32)[:, None]
        mask_NM = in_columns_N[:, None] & is_pair_M[None, :]
        store(out_ref.at[pair_M[None, :], column_N[:, None]], sum_NM.astype(out_ref.dtype), mask=mask_NM)

    find(*tables, pl.program_id(1), tiles.block_m, do_tile)


def _products(
    tiles: Tiles,
    x_ref: Any,
    row_M: jax.Array,
    is_row_M: jax.Array,
    words_ref: Any,
    exponents_ref: Any,
    matrices: list[tuple[Any, ...]],
    column_N: jax.Array,
    in_columns_N: jax.Array,
    *,
    interpret: bool,
) -> list[jax.Array]:
    """float32 [N, M]: weight[matrix, column] @ x[row].T for each of the matrices, given by their leading indices."""
    num_terms = x_ref.shape[1]

    def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        weights = [
            _values(tiles, words_ref, exponents_ref, m, column_N, in_columns_N, i, num_terms, interpret=interpret)
            for m in matrices
        ]
        for value in range(WORD):
            x_KM = _inputs(tiles, x_ref, row_M, is_row_M, i, value)
            sums = [sum_NM + dot_f32(weight[value], x_KM) for sum_NM, weight in zip(sums, weights, strict=True)]
        return sums

    zeros = jnp.zeros((tiles.block_n, tiles.block_m), jnp.float32)
    sums = lax.fori_loop(0, pl.cdiv(num_terms, tiles.block_k), step, [zeros for _ in matrices])
    return [sum_NM * 2.0**SCALE_SHIFT for sum_NM in sums]


def _values(
    tiles: Tiles,
    words_ref: Any,
    exponents_ref: Any,
    matrix: tuple[Any, ...],
    column_N: jax.Array,
    in_columns_N: jax.Array,
    turn: jax.Array,
    num_terms: int,
    *,
    interpret: bool,
) -> list[jax.Array]:
    """Of a step: see `_widen`."""
    word_1W = (turn * (tiles.block_k // WORD) + jnp.arange(tiles.block_k // WORD))[None, :]
    block_B1 = (turn * (tiles.block_k // BLOCK) + jnp.arange(tiles.block_k // BLOCK))[:, None]
    mask = in_columns_N[:, None] & (word_1W < num_terms // WORD)
    words = load(words_ref.at[(*matrix, column_N[:, None], word_1W)], mask=mask, other=0)
    mask = in_columns_N[None, :] & (block_B1 < num_terms // BLOCK)
    exponents = load(exponents_ref.at[(*matrix, block_B1, column_N[None, :])], mask=mask, other=0)
    return _widen(words, exponents, interpret=interpret)


def _inputs(tiles: Tiles, x_ref: Any, row_M: jax.Array, is_row_M: jax.Array, turn: jax.Array, value: int) -> jax.Array:
    """[W, M]: the terms of x that this value of each word is multiplied with."""
    word_W = jnp.arange(tiles.block_k // WORD)
    term_W = turn * tiles.block_k + lax.div(word_W, WORDS) * BLOCK + value * WORDS + lax.rem(word_W, WORDS)
    mask = (term_W < x_ref.shape[1])[:, None] & is_row_M[None, :]
    return load(x_ref.at[row_M[None, :], term_W[:, None]], mask=mask, other=0.0)


def _summed_down_kernel(
    expert_ref: Any,  # [P]
    weight_ref: Any,  # [T, k]
    x_ref: Any,  # [P, F]
    words_ref: Any,  # [E, D, F / 4]
    exponents_ref: Any,  # [E, F / 32, D]
    *refs: Any,  # bias [E, D] if there is one; out [T, D]
    tiles: Tiles,
    num_experts: int,
    interpret: bool,
) -> None:
    *bias_ref, out_ref = refs
    (num_pairs, num_terms), (num_tokens, num_choices) = x_ref.shape, weight_ref.shape
    column_N = pl.program_id(0) * tiles.block_n + jnp.arange(tiles.block_n)
    in_columns_N = column_N < out_ref.shape[1]
    pair_M = jnp.arange(MAX_SUMMED_PAIRS)
    num_steps = pl.cdiv(num_terms, tiles.block_k)

    def step(i: jax.Array, sum_NM: jax.Array) -> jax.Array:
        pair, turn = lax.div(i, num_steps), lax.rem(i, num_steps)
        expert = expert_ref[pair]
        matrix = (jnp.minimum(expert, num_experts - 1),)
        is_column_N = in_columns_N & (expert < num_experts)
        weight = _values(tiles, words_ref, exponents_ref, matrix, column_N, is_column_N, turn, num_terms, interpret=interpret)
        for value in range(WORD):
            sum_NM += dot_f32(weight[value], _inputs(tiles, x_ref, pair_M, pair_M == pair, turn, value))
        return sum_NM

    zeros = jnp.zeros((tiles.block_n, MAX_SUMMED_PAIRS), jnp.float32)
    sum_NM = lax.fori_loop(0, num_pairs * num_steps, step, zeros) * 2.0**SCALE_SHIFT
    is_pair_M = pair_M < num_pairs
    expert_M = load(expert_ref.at[pair_M], mask=is_pair_M, other=num_experts)
    is_here_M = expert_M < num_experts
    if bias_ref:
        mask_NM = in_columns_N[:, None] & is_here_M[None, :]
        sum_NM += load(bias_ref[0].at[expert_M[None, :], column_N[:, None]], mask=mask_NM, other=0.0).astype(jnp.float32)
    # Each expert's result is rounded, as where there are more pairs.
    out_NM = sum_NM.astype(out_ref.dtype).astype(jnp.float32)
    token_M, choice_M = lax.div(pair_M, num_choices), lax.rem(pair_M, num_choices)
    weight_M = load(weight_ref.at[token_M, choice_M], mask=is_here_M, other=0.0)
    for token in range(num_tokens):
        weight_1M = jnp.where(token_M == token, weight_M, 0.0)[None, :]
        out_N = jnp.sum(jnp.where(is_here_M[None, :], weight_1M * out_NM, 0.0), axis=1)
        store(out_ref.at[token, column_N], out_N.astype(out_ref.dtype), mask=in_columns_N)
