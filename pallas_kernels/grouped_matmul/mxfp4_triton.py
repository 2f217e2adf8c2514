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
from jax.typing import DTypeLike

from pallas_kernels._compat import dot_f32, inline_asm, load, store, triton_call
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, DTYPE, MAGNITUDES, PLACES, WORD, WORDS, Mxfp4
from pallas_kernels.grouped_matmul.plan import local_experts, make_plan, max_tiles, weighted_sum
from pallas_kernels.grouped_matmul.triton import MAX_FEW_PAIRS, _for_pairs_of_expert, _for_tile, _tables


@dataclass(frozen=True)
class Tiles:
    """A program computes block_n columns of block_m pairs, block_k terms at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiling:
    """Tiles of both kernels, whose block_m is the same."""

    gate_up: Tiles
    """Computes block_n hidden values: as many columns of gate, and of up."""
    down: Tiles


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


def _factors(exponents: jax.Array) -> jax.Array:
    """What the bits of words [N, W] are multiplied with, for exponents uint8 [W / 8, N]: bfloat16 [N, W]."""
    exponents = exponents.T
    N, B = exponents.shape
    bits = (exponents.astype(jnp.uint16) + SCALE_SHIFT) << 7
    factors = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jnp.broadcast_to(factors[:, :, None], (N, B, WORDS)).reshape(N, B * WORDS)


def _widen(words: jax.Array, factors: jax.Array, value: int, *, interpret: bool) -> jax.Array:
    """bfloat16 [N, W]: one of the four values of words uint16 [N, W], times 2^-63."""
    if not interpret:
        result = [jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)]
        asm = _TIMES.format(_BITS[value])
        return inline_asm(asm, args=[words, factors], constraints="=r,r,r", pack=2, result_shape_dtypes=result)[0]
    sign, *places = PLACES[value]
    code = sum((words >> place & 1) << bit for bit, place in zip((2, 1, 0), places, strict=True))
    size = sum(jnp.where(code == i, magnitude, 0.0) for i, magnitude in enumerate(MAGNITUDES))
    scale = factors.astype(jnp.float32) * 2.0**-126
    return (jnp.where(words >> sign & 1, -size, size) * scale).astype(jnp.bfloat16)


def supports(
    *, platform: str, dtype: DTypeLike, weight_dtype: DTypeLike, width: int, hidden: int, interpret: bool = False
) -> bool:
    # Words of a row begin at multiples of 16 bytes.
    aligned = width % BLOCK == 0 and hidden % BLOCK == 0
    return (
        (platform == "gpu" or interpret) and aligned and jnp.dtype(dtype) == jnp.bfloat16 and jnp.dtype(weight_dtype) == DTYPE
    )


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
    out_PD = call(_down_kernel, "experts4_down", tiling.down, width, (num_pairs, width), hidden_PF, *weights, *biases)
    return weighted_sum(out_PD, expert_P, weight_Tk, num_experts)


def widened(x: jax.Array, *weights: Mxfp4, interpret: bool = False) -> list[jax.Array]:
    """The weights in bfloat16, computed when x is there: else those of many layers could be widened at once."""
    x, weights = lax.optimization_barrier((x, weights))
    return [_widened(weight, interpret=interpret) for weight in weights]


def _widened(weight: Mxfp4, *, interpret: bool) -> jax.Array:
    *lead, num_columns, num_terms = weight.shape
    words = weight.words.reshape(-1, *weight.words.shape[-2:])
    exponents = weight.exponents.reshape(-1, *weight.exponents.shape[-2:])
    tiles = Tiles(0, 64, 256, num_warps=4, num_stages=1)
    wide = triton_call(
        functools.partial(_widening_kernel, tiles=tiles, interpret=interpret),
        name="experts4_widen",
        grid=(pl.cdiv(num_terms, tiles.block_k), pl.cdiv(num_columns, tiles.block_n), len(words)),
        out_shape=jax.ShapeDtypeStruct((len(words), num_columns, num_terms), jnp.bfloat16),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(words, exponents)
    return wide.reshape(*lead, num_columns, num_terms)


def _widening_kernel(words_ref: Any, exponents_ref: Any, out_ref: Any, *, tiles: Tiles, interpret: bool) -> None:
    # words [L, N, K / 4], exponents [L, K / 32, N], out [L, N, K]
    _, num_columns, num_terms = out_ref.shape
    step, matrix = pl.program_id(0), pl.program_id(2)
    column_N = pl.program_id(1) * tiles.block_n + jnp.arange(tiles.block_n)
    in_columns_N = column_N < num_columns
    place_W = jnp.arange(tiles.block_k // WORD)
    word_W = step * (tiles.block_k // WORD) + place_W
    block_B = step * (tiles.block_k // BLOCK) + jnp.arange(tiles.block_k // BLOCK)
    mask_NW = in_columns_N[:, None] & (word_W < num_terms // WORD)[None, :]
    words_NW = load(words_ref.at[matrix, column_N[:, None], word_W[None, :]], mask=mask_NW, other=0)
    mask_BN = (block_B < num_terms // BLOCK)[:, None] & in_columns_N[None, :]
    factors_NW = _factors(load(exponents_ref.at[matrix, block_B[:, None], column_N[None, :]], mask=mask_BN, other=0))
    for value in range(WORD):
        values_NW = _widen(words_NW, factors_NW, value, interpret=interpret).astype(jnp.float32) * 2.0**SCALE_SHIFT
        term_W = step * tiles.block_k + _terms(place_W, value)
        store(out_ref.at[matrix, column_N[:, None], term_W[None, :]], values_NW.astype(out_ref.dtype), mask=mask_NW)


def _terms(word_W: jax.Array, value: int) -> jax.Array:
    """The places of a value of each word among the terms."""
    return lax.div(word_W, WORDS) * BLOCK + value * WORDS + lax.rem(word_W, WORDS)


def pick_tiling(num_pairs: int, num_experts: int) -> Tiling:
    """As measured on an H200 with gpt-oss's experts."""
    if num_pairs <= 16 * num_experts:
        return Tiling(Tiles(16, 64, 256, num_warps=4, num_stages=3), Tiles(16, 64, 256, num_warps=4, num_stages=4))
    return Tiling(Tiles(64, 64, 256, num_warps=4, num_stages=2), Tiles(64, 128, 128, num_warps=4, num_stages=3))


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
    word_W, block_B = jnp.arange(tiles.block_k // WORD), jnp.arange(tiles.block_k // BLOCK)

    def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        first_word, first_block = i * len(word_W), i * len(block_B)
        mask_NW = in_columns_N[:, None] & (first_word + word_W < num_terms // WORD)[None, :]
        mask_BN = (first_block + block_B < num_terms // BLOCK)[:, None] & in_columns_N[None, :]
        weights = []
        for matrix in matrices:
            index = (*matrix, column_N[:, None], (first_word + word_W)[None, :])
            words_NW = load(words_ref.at[index], mask=mask_NW, other=0)
            index = (*matrix, (first_block + block_B)[:, None], column_N[None, :])
            exponents_BN = load(exponents_ref.at[index], mask=mask_BN, other=0)
            weights.append((words_NW, _factors(exponents_BN)))
        for value in range(WORD):
            term_W = i * tiles.block_k + _terms(word_W, value)
            mask_WM = (term_W < num_terms)[:, None] & is_row_M[None, :]
            x_WM = load(x_ref.at[row_M[None, :], term_W[:, None]], mask=mask_WM, other=0.0)
            sums = [
                sum_NM + dot_f32(_widen(*weight, value, interpret=interpret), x_WM)
                for sum_NM, weight in zip(sums, weights, strict=True)
            ]
        return sums

    zeros = jnp.zeros((tiles.block_n, tiles.block_m), jnp.float32)
    sums = lax.fori_loop(0, pl.cdiv(num_terms, tiles.block_k), step, [zeros for _ in matrices])
    return [sum_NM * 2.0**SCALE_SHIFT for sum_NM in sums]
