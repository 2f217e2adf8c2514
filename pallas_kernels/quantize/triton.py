"""Pallas-Triton kernels that read every array once: a program has some whole rows in registers, in chunks of their columns.

    sums, scales, residual --> x = residual + sums * row * column --> squares of x, largest of |x * weight|
                               |                                        |
    x                     <----+     values <-- x * weight * 448 / largest,  scale = rms factor * largest / 448

Squares and the largest value are found in the same pass, because the values do not depend on the factor of the norm. Both are reduced
once, behind the last chunk: a reduction is a barrier, which no later load would pass.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import load, store, triton_call, triton_converts_fp8
from pallas_kernels.quantize.values import DTYPE, LARGEST, TINY, Quantized, Sums
from pallas_kernels.sizes import next_power_of_two

LARGEST_WIDTH = 32768
"""Of a row that fits the registers of a program."""
_COMPUTED = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Tiles:
    rows: int
    """Rows of a program, a power of two: they share what is read of the columns' scales."""
    chunk: int
    """Columns at a time, a power of two."""
    num_warps: int


def supports(*, platform: str, dtype: DTypeLike, widths: Sequence[int], interpret: bool = False) -> bool:
    return (
        (interpret or (platform == "gpu" and triton_converts_fp8()))
        and jnp.dtype(dtype) in _COMPUTED
        and max(widths) <= LARGEST_WIDTH
    )


def pick_tiles(num_rows: int, width: int) -> Tiles:
    """Few rows: many threads for each, for the shortest way through. Many: several programs share a multiprocessor."""
    return Tiles(1, min(2048, next_power_of_two(width)), 16 if num_rows < 1024 and width > 8192 else 8)


def add_norm_quantize(
    sums: Sums, residual_TD: jax.Array, weight_D: jax.Array, *, eps: float, interpret: bool = False, tiles: Tiles | None = None
) -> tuple[jax.Array, Quantized]:
    shape = residual_TD.shape
    out = jax.ShapeDtypeStruct(shape, residual_TD.dtype)
    call = _call(functools.partial(_add_norm_quantize, eps=eps), "add_norm_quantize", shape, [out], interpret, tiles)
    x_TD, values_TD, scale_T = call(sums.values, sums.row_scale_T, sums.column_scale, residual_TD, weight_D)
    return x_TD, Quantized(values_TD, scale_T)


def silu_up_quantize(sums: Sums, *, interpret: bool = False, tiles: Tiles | None = None) -> Quantized:
    num_rows, _, width = sums.values.shape
    call = _call(_silu_up_quantize, "silu_up_quantize", (num_rows, width), [], interpret, tiles)
    return Quantized(*call(sums.values, sums.row_scale_T, sums.column_scale))


def quantize(x_TN: jax.Array, *, interpret: bool = False, tiles: Tiles | None = None) -> Quantized:
    return Quantized(*_call(_quantize, "quantize", x_TN.shape, [], interpret, tiles)(x_TN))


def _call(
    kernel: Callable[..., None],
    name: str,
    shape: tuple[int, ...],
    first_out: list[jax.ShapeDtypeStruct],
    interpret: bool,
    tiles: Tiles | None,
) -> Callable[..., Any]:
    num_rows, width = shape
    tiles = tiles or pick_tiles(num_rows, width)
    return triton_call(
        functools.partial(kernel, tiles=tiles),
        name=name,
        grid=(pl.cdiv(num_rows, tiles.rows),),
        out_shape=(*first_out, jax.ShapeDtypeStruct(shape, DTYPE), jax.ShapeDtypeStruct((num_rows,), jnp.float32)),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=interpret,
    )


def _add_norm_quantize(
    sums_ref, row_ref, column_ref, residual_ref, weight_ref, x_ref, values_ref, scale_ref, *, tiles: Tiles, eps: float
) -> None:
    row_R, in_R, chunks = _places(residual_ref.shape, tiles)
    factor_R1 = load(row_ref.at[row_R], mask=in_R, other=0.0)[:, None]
    squares, weighted = [], []
    for place, column_C, in_C, mask in chunks:
        sums_RC = _load_once(sums_ref.at[place], mask)
        column_1C = load(column_ref.at[column_C], mask=in_C, other=0.0)[None, :]
        residual_RC = _load_once(residual_ref.at[place], mask)
        x_RC = (residual_RC + sums_RC * factor_R1 * column_1C).astype(x_ref.dtype)
        store(x_ref.at[place], x_RC, mask=mask)
        wide_RC = x_RC.astype(jnp.float32)
        squares.append(wide_RC * wide_RC)
        weighted.append(wide_RC * load(weight_ref.at[column_C], mask=in_C, other=0.0).astype(jnp.float32)[None, :])
    mean_R = jnp.sum(functools.reduce(jnp.add, squares), axis=1) / residual_ref.shape[1]
    norm_R = lax.rsqrt(mean_R + eps)
    _write(weighted, norm_R, row_R, in_R, chunks, values_ref, scale_ref)


def _silu_up_quantize(sums_ref, row_ref, column_ref, values_ref, scale_ref, *, tiles: Tiles) -> None:
    row_R, in_R, chunks = _places(values_ref.shape, tiles)
    factor_R1 = load(row_ref.at[row_R], mask=in_R, other=0.0)[:, None]
    products = []
    for (row_R1, column_1C), column_C, in_C, mask in chunks:
        gate_RC, up_RC = (
            _load_once(sums_ref.at[row_R1, half, column_1C], mask)
            * factor_R1
            * load(column_ref.at[half, column_C], mask=in_C, other=0.0)[None, :]
            for half in (0, 1)
        )
        products.append(gate_RC / (1 + jnp.exp(-gate_RC)) * up_RC)
    _write(products, 1.0, row_R, in_R, chunks, values_ref, scale_ref)


def _quantize(x_ref, values_ref, scale_ref, *, tiles: Tiles) -> None:
    row_R, in_R, chunks = _places(x_ref.shape, tiles)
    loaded = [_load_once(x_ref.at[place], mask) for place, _, _, mask in chunks]
    _write(loaded, 1.0, row_R, in_R, chunks, values_ref, scale_ref)


def _places(shape: tuple[int, int], tiles: Tiles) -> tuple[jax.Array, jax.Array, list[tuple[Any, ...]]]:
    """A program's rows, which of them exist, and of each chunk its place in the rows, its columns, which exist, and both masks."""
    num_rows, width = shape
    row_R = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    in_R, chunks = row_R < num_rows, []
    for start in range(0, width, tiles.chunk):
        column_C = start + jnp.arange(tiles.chunk)
        in_C = column_C < width
        chunks.append(((row_R[:, None], column_C[None, :]), column_C, in_C, in_R[:, None] & in_C[None, :]))
    return row_R, in_R, chunks


def _load_once(ref: Any, mask: jax.Array) -> jax.Array:
    """Float32, of what no other program reads: it must not drive out of the multiprocessor's cache what all rows read."""
    return load(ref, mask=mask, other=0.0, eviction_policy="evict_first").astype(jnp.float32)


def _write(
    parts: list[jax.Array],
    factor: jax.Array | float,
    row_R: jax.Array,
    in_R: jax.Array,
    chunks: list[tuple[Any, ...]],
    values_ref: Any,
    scale_ref: Any,
) -> None:
    """Rows [R, C] of a chunk each, times a factor of each row, as values and scales."""
    largest_R = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, parts)), axis=1)
    scale_R = jnp.maximum(largest_R * factor, TINY) / LARGEST
    inverse_R1 = (factor / scale_R)[:, None]
    for part_RC, (place, _, _, mask) in zip(parts, chunks, strict=True):
        store(values_ref.at[place], jnp.clip(part_RC * inverse_R1, -LARGEST, LARGEST).astype(DTYPE), mask=mask)
    store(scale_ref.at[row_R], scale_R, mask=in_R)
