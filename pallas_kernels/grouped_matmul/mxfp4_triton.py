"""Both products with weights of 4 bits by the kernels of `triton` and `triton_few`, which widen these in registers.

    [columns, block_k] words -> values -> tensor cores (weights @ x.T, so that a tile of few rows is narrow) -> [columns, block_m]

Four words p, p + 1, ... of a block give four tiles of values, p, p + 8, ...; each is multiplied with those columns of x.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import dot_f32, inline_asm, load, store, triton_call
from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, DTYPE, MAGNITUDES, PLACES, SCALE_BIAS, WORD, WORDS, Mxfp4
from pallas_kernels.grouped_matmul.tiles import At, Kind, Tiles
from pallas_kernels.grouped_matmul.triton import Tiling
from pallas_kernels.grouped_matmul.triton_few import MAX_TOKENS, FewTiling, takes_few

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
    bits = (exponents.T.astype(jnp.uint16) + SCALE_SHIFT) << 7
    return _repeated(lax.bitcast_convert_type(bits, jnp.bfloat16), WORDS)


def _repeated(x_NB: jax.Array, times: int) -> jax.Array:
    """[N, B * times]"""
    N, B = x_NB.shape
    return jnp.broadcast_to(x_NB[:, :, None], (N, B, times)).reshape(N, B * times)


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
    tiling: Tiling | FewTiling | None = None,
    max_few_pairs: int = 0,
    interpret: bool = False,
    **options: Any,
) -> jax.Array:
    """As `triton.experts`. Always with a plan, unless tokens are few: finding pairs takes registers that widening needs."""
    num_tokens, num_choices = expert_Tk.shape
    return triton.experts(
        x_TD,
        expert_Tk,
        weight_Tk,
        gate_up_E2FD,
        down_EDF,
        tiling=tiling or pick_tiling(num_tokens, num_choices, len(down_EDF)),
        max_few_pairs=max_few_pairs,
        kind=Kind(
            "experts4", lambda weight: [weight.words, weight.exponents], functools.partial(_products, interpret=interpret)
        ),
        interpret=interpret,
        **options,
    )


def pick_tiling(num_tokens: int, num_choices: int, num_experts: int) -> Tiling | FewTiling:
    """As measured on an H200 with gpt-oss's experts."""
    if takes_few(num_tokens, num_choices):
        return FewTiling(Tiles(MAX_TOKENS, 64, 256, num_stages=3), Tiles(MAX_TOKENS, 64, 256, num_stages=6), num_shares=8)
    if num_tokens * num_choices <= 16 * num_experts:
        return Tiling(Tiles(16, 64, 128), Tiles(16, 128, 128))
    return Tiling(Tiles(64, 128, 128, num_warps=8, num_stages=3), Tiles(64, 256, 128, num_warps=8, num_stages=3))


def _products(
    tiles: Tiles,
    steps: tuple[Any, Any],
    at: At,
    weight_refs: Sequence[Any],
    num_matrices: int,
    num_terms: int,
    first_column: jax.Array,
    num_columns: int,
    *,
    interpret: bool,
) -> list[jax.Array]:
    """As `tiles.products`. The matrices' columns are rows C of one tile, matrices differ in their last leading index alone."""
    words_ref, exponents_ref = weight_refs
    index_C = jnp.arange(num_matrices * tiles.block_n)
    column_C = first_column + lax.rem(index_C, tiles.block_n)
    in_columns_C = column_C < num_columns
    word_W, block_B = jnp.arange(tiles.block_k // WORD), jnp.arange(tiles.block_k // BLOCK)

    def step(i: jax.Array, sum_CM: jax.Array) -> jax.Array:
        place, matrices, load_x = at(i)
        *lead, matrix = matrices[0]
        matrix_C = matrix + lax.div(index_C, tiles.block_n)
        first_word, first_block = place * len(word_W), place * len(block_B)
        mask_CW = in_columns_C[:, None] & (first_word + word_W < num_terms // WORD)[None, :]
        mask_BC = (first_block + block_B < num_terms // BLOCK)[:, None] & in_columns_C[None, :]
        index = (*lead, matrix_C[:, None], column_C[:, None], (first_word + word_W)[None, :])
        words_CW = load(words_ref.at[index], mask=mask_CW, other=0)
        index = (*lead, matrix_C[None, :], (first_block + block_B)[:, None], column_C[None, :])
        factors_CW = _factors(load(exponents_ref.at[index], mask=mask_BC, other=0))
        for value in range(WORD):
            x_MW = load_x(place * tiles.block_k + _terms(word_W, value))
            sum_CM += dot_f32(_widen(words_CW, factors_CW, value, interpret=interpret), x_MW.T)
        return sum_CM

    zeros = jnp.zeros((num_matrices * tiles.block_n, tiles.block_m), jnp.float32)
    sum_CM = lax.fori_loop(*steps, step, zeros) * 2.0**SCALE_SHIFT
    if num_matrices == 1:
        return [sum_CM.T]
    sum_ANM = sum_CM.reshape(num_matrices, tiles.block_n, tiles.block_m)
    matrix_A11 = jnp.arange(num_matrices)[:, None, None]
    return [jnp.sum(jnp.where(matrix_A11 == matrix, sum_ANM, 0.0), axis=0).T for matrix in range(num_matrices)]


def _terms(word_W: jax.Array, value: int) -> jax.Array:
    """The places of a value of each word among the terms."""
    return lax.div(word_W, WORDS) * BLOCK + value * WORDS + lax.rem(word_W, WORDS)


def widened(x: jax.Array, *weights: Mxfp4, interpret: bool = False) -> list[jax.Array]:
    """The weights in bfloat16, computed when x is there: else those of many layers could be widened at once."""
    x, weights = lax.optimization_barrier((x, weights))
    return [_widened(weight, interpret=interpret) for weight in weights]


def _widened(weight: Mxfp4, *, interpret: bool) -> jax.Array:
    *lead, num_columns, num_terms = weight.shape
    words = weight.words.reshape(-1, *weight.words.shape[-2:])
    exponents = weight.exponents.reshape(-1, *weight.exponents.shape[-2:])
    tiles = Tiles(0, 16, 256, num_warps=4, num_stages=1)
    wide = triton_call(
        functools.partial(_widening_kernel, tiles=tiles),
        name="experts4_widen",
        grid=(pl.cdiv(num_terms, tiles.block_k), pl.cdiv(num_columns, tiles.block_n), len(words)),
        out_shape=jax.ShapeDtypeStruct((len(words), num_columns, num_terms), jnp.bfloat16),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(words, exponents)
    return wide.reshape(*lead, num_columns, num_terms)


def _widening_kernel(words_ref: Any, exponents_ref: Any, out_ref: Any, *, tiles: Tiles) -> None:
    # words [L, N, K / 4], exponents [L, K / 32, N], out [L, N, K]
    _, num_columns, num_terms = out_ref.shape
    step, matrix = pl.program_id(0), pl.program_id(2)
    column_N = pl.program_id(1) * tiles.block_n + jnp.arange(tiles.block_n)
    in_columns_N = column_N < num_columns
    term_K = step * tiles.block_k + jnp.arange(tiles.block_k)
    mask_NK = in_columns_N[:, None] & (term_K < num_terms)[None, :]
    # A thread stores neighbouring values, and reads each word once for each of its four.
    word_K, value_K = lax.div(term_K, BLOCK) * WORDS + lax.rem(term_K, WORDS), lax.rem(lax.div(term_K, WORDS), WORD)
    words_NK = load(words_ref.at[matrix, column_N[:, None], word_K[None, :]], mask=mask_NK, other=0).astype(jnp.int32)
    values_NK = _value(words_NK, jnp.broadcast_to(value_K[None, :], words_NK.shape))
    block_B = step * (tiles.block_k // BLOCK) + jnp.arange(tiles.block_k // BLOCK)
    mask_BN = (block_B < num_terms // BLOCK)[:, None] & in_columns_N[None, :]
    exponents_BN = load(exponents_ref.at[matrix, block_B[:, None], column_N[None, :]], mask=mask_BN, other=SCALE_BIAS)
    # 2^(exponent - 127) as the bits of a float32; that of 0 is less than any normal number.
    bits_NB = exponents_BN.T.astype(jnp.int32)
    bits_NB = jnp.where(bits_NB == 0, 1 << 22, bits_NB << 23)
    scales_NK = _repeated(lax.bitcast_convert_type(bits_NB, jnp.float32), BLOCK)
    out_NK = (values_NK * scales_NK).astype(out_ref.dtype)
    store(out_ref.at[matrix, column_N[:, None], term_K[None, :]], out_NK, mask=mask_NK)


def _value(words: jax.Array, value: jax.Array) -> jax.Array:
    """float32: of each word the value with this number."""
    last = (words << 1 & 0x8000) | (words >> 4 & 0xC0) | (words >> 5 & 0x100)
    bits = jnp.where(value == WORD - 1, last, words << 3 * value)
    # The bits of a float16 of 2^-14 times the size.
    bits = (bits & 0x8000) | (bits & 0x01C0) << 3
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32) * 2.0**14
