"""Pallas-Triton kernels that read every array once: a program has a whole row in registers, in chunks of its columns.

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
    chunk = min(4096 if width <= 8192 else 2048, next_power_of_two(width))
    return Tiles(chunk, 16 if num_rows < 256 or width > 16384 else 8)


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
        functools.partial(kernel, chunk=tiles.chunk),
        name=name,
        grid=(num_rows,),
        out_shape=(*first_out, jax.ShapeDtypeStruct(shape, DTYPE), jax.ShapeDtypeStruct((num_rows,), jnp.float32)),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=interpret,
    )


def _add_norm_quantize(
    sums_ref, row_ref, column_ref, residual_ref, weight_ref, x_ref, values_ref, scale_ref, *, chunk: int, eps: float
) -> None:
    row, width = pl.program_id(0), residual_ref.shape[1]
    row_scale, squares, weighted = row_ref[row], [], []
    for column_C, mask_C in _chunks(width, chunk):
        sums_C = _load_once(sums_ref.at[row, column_C], mask_C) * row_scale * _load_shared(column_ref.at[column_C], mask_C)
        x_C = (_load_once(residual_ref.at[row, column_C], mask_C) + sums_C).astype(x_ref.dtype)
        store(x_ref.at[row, column_C], x_C, mask=mask_C)
        wide_C = x_C.astype(jnp.float32)
        squares.append(wide_C * wide_C)
        weighted.append(wide_C * _load_shared(weight_ref.at[column_C], mask_C))
    mean = jnp.sum(functools.reduce(jnp.add, squares)) / width
    _write(weighted, lax.rsqrt(mean + eps), values_ref, scale_ref, chunk)


def _silu_up_quantize(sums_ref, row_ref, column_ref, values_ref, scale_ref, *, chunk: int) -> None:
    row = pl.program_id(0)
    row_scale, products = row_ref[row], []
    for column_C, mask_C in _chunks(values_ref.shape[1], chunk):
        gate_C, up_C = (
            _load_once(sums_ref.at[row, half, column_C], mask_C)
            * row_scale
            * _load_shared(column_ref.at[half, column_C], mask_C)
            for half in (0, 1)
        )
        products.append(gate_C / (1 + jnp.exp(-gate_C)) * up_C)
    _write(products, 1.0, values_ref, scale_ref, chunk)


def _quantize(x_ref, values_ref, scale_ref, *, chunk: int) -> None:
    row = pl.program_id(0)
    parts = [_load_once(x_ref.at[row, column_C], mask_C) for column_C, mask_C in _chunks(x_ref.shape[1], chunk)]
    _write(parts, 1.0, values_ref, scale_ref, chunk)


def _chunks(width: int, chunk: int) -> list[tuple[jax.Array, jax.Array]]:
    """The columns of each chunk, and which of them exist."""
    columns = [start + jnp.arange(chunk) for start in range(0, width, chunk)]
    return [(column_C, column_C < width) for column_C in columns]


def _load_once(ref: Any, mask_C: jax.Array) -> jax.Array:
    """Float32, of what no other program reads: it must not drive out of the multiprocessor's cache what all rows read."""
    return load(ref, mask=mask_C, other=0.0, eviction_policy="evict_first").astype(jnp.float32)


def _load_shared(ref: Any, mask_C: jax.Array) -> jax.Array:
    """Float32, of what all programs read."""
    return load(ref, mask=mask_C, other=0.0).astype(jnp.float32)


def _write(parts: list[jax.Array], factor: jax.Array | float, values_ref: Any, scale_ref: Any, chunk: int) -> None:
    """A row, of which each part is a chunk, times a factor, as values and a scale."""
    row, width = pl.program_id(0), values_ref.shape[1]
    largest = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, parts)))
    scale = jnp.maximum(largest * factor, TINY) / LARGEST
    inverse = factor / scale
    for part_C, (column_C, mask_C) in zip(parts, _chunks(width, chunk), strict=True):
        store(values_ref.at[row, column_C], jnp.clip(part_C * inverse, -LARGEST, LARGEST).astype(DTYPE), mask=mask_C)
    scale_ref[row] = scale
