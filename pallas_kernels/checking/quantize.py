"""Quantisation with norm or activation: values that are the exact ones but for rounding to fp8, scales and residuals near theirs."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.quantize import Quantized, Sums, add_norm_quantize, quantize, reference, silu_up_quantize
from pallas_kernels.quantize.values import LARGEST, TINY

TOLERANCE = 2e-5
"""Bound of errors of a scale, and of what is more than rounding, relative to the largest value of a vector."""
_HALF_STEP = 1.05 / 16
"""Error of a value in fp8, relative: what rounding alone does, and a twentieth more."""
_SMALLEST_NORMAL = 2.0**-6
_RESIDUAL_HALF_STEP = 2.0**-8
"""Error of a residual in 16 bits, relative, at most: that of bfloat16."""


@dataclass(frozen=True)
class Shapes:
    """The vectors of a model that products quantise."""

    dtype: str
    width: int
    """Width of the model."""
    of_heads: int
    """Values of all heads of a token together."""
    of_mlp: int
    """Between the products of the MLP; 0: there is none."""
    eps: float


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A few tokens, and as many as the kernels have other tiles for; odd numbers."""
    call = functools.partial(case, implementations=(implementation,), dtype=shapes.dtype, interpret=interpret)
    found = []
    for num_tokens in (3, 261):
        found.append(call("add_norm_quantize", num_tokens, shapes.width, eps=shapes.eps))
        found += [call("quantize", num_tokens, width) for width in dict.fromkeys((shapes.width, shapes.of_heads))]
        found += [call("silu_up_quantize", num_tokens, shapes.of_mlp)] * bool(shapes.of_mlp)
    return found


def case(
    function: str,
    num_tokens: int,
    width: int,
    *,
    implementations: tuple[str, ...],
    dtype: str,
    interpret: bool,
    eps: float = 1e-5,
) -> Case:
    """A function of the op, by its name, with vectors of a width."""
    make, compute, error, num_bytes = _FUNCTIONS[function]
    options = {"interpret": interpret} | ({"eps": eps} if function == "add_norm_quantize" else {})
    return Case(
        f"{function}, {num_tokens} tokens of {width} values",
        functools.partial(make, num_tokens, width, dtype),
        {name: functools.partial(compute, implementation=name, **options) for name in implementations},
        functools.partial(error, eps=eps),
        TOLERANCE,
        bytes=float(num_tokens * width * num_bytes),
        feed=_depend,
    )


def _vectors(normals: Normals, dtype: str, *shape: int) -> np.ndarray:
    """Vectors of different size, one of them zero."""
    x = normals(*shape) * np.logspace(-3, 3, shape[0], dtype=np.float32).reshape(-1, *(1,) * (len(shape) - 1))
    x[len(x) // 2] = 0
    return x.astype(jnp.dtype(dtype))


def _sums(num_tokens: int, outputs: tuple[int, ...], dtype: str) -> tuple[Any, tuple[Any, ...]]:
    normals = Normals()
    row_scale_T = np.abs(normals(num_tokens)) + np.float32(0.1)
    return _vectors(normals, dtype, num_tokens, *outputs), (row_scale_T, np.abs(normals(*outputs)) * np.float32(0.02))


def _make_add_norm(num_tokens: int, width: int, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    carry, scales = _sums(num_tokens, (width,), dtype)
    normals = Normals()
    weight = (1 + 0.1 * normals(width)).astype(jnp.dtype(dtype))
    return carry, (*scales, (normals(num_tokens, width) * 0.5).astype(jnp.dtype(dtype)), weight)


def _make_silu_up(num_tokens: int, width: int, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    return _sums(num_tokens, (2, width), dtype)


def _make_plain(num_tokens: int, width: int, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    return _vectors(Normals(), dtype, num_tokens, width), ()


def _add_norm(values: Any, row: Any, column: Any, residual: Any, weight: Any, **options: Any) -> tuple[Any, Quantized]:
    return add_norm_quantize(Sums(values, row, column), residual, weight, **options)


def _silu_up(values: Any, row: Any, column: Any, **options: Any) -> Quantized:
    return silu_up_quantize(Sums(values, row, column), **options)


def _add_norm_error(values: Any, constants: tuple[Any, ...], got: tuple[Any, Quantized], *, eps: float) -> float:
    """The norm is that of the residual that was found: it may be rounded the other way. In the norm, subnormal numbers of its type may be
    zero: plain JAX rounds by `reduce_precision`, which makes them so. In float16 they are below 6e-5, which a value in fp8 still shows."""
    row, column, residual, weight = constants
    x_TD, quantized = got
    added = reference.scaled(Sums(values, row, column))
    old, new = (np.asarray(x).astype(np.float64) for x in (residual, x_TD))
    number = jnp.finfo(x_TD.dtype)
    rounding = (_RESIDUAL_HALF_STEP * (number.bits < 32) + 1e-6) * np.abs(old + added) + float(number.smallest_subnormal) / 2
    off = np.abs(new - old - added) - rounding
    size = np.maximum(np.abs(old), np.abs(added))
    exact_TD = reference.norm(x_TD, weight, eps)
    dropped_TD = np.where(np.abs(new) < float(number.smallest_normal), np.abs(exact_TD), 0)
    return max(float((off / np.maximum(size, TINY)).max()), _error(quantized, exact_TD, dropped_TD))


def _silu_up_error(values: Any, constants: tuple[Any, ...], got: Quantized, *, eps: float) -> float:
    return _error(got, reference.silu_up(Sums(values, *constants)))


def _plain_error(x: Any, constants: tuple[Any, ...], got: Quantized, *, eps: float) -> float:
    return _error(got, np.asarray(x).astype(np.float64))


def _error(got: Quantized, exact_TN: np.ndarray, dropped_TN: np.ndarray | float = 0.0) -> float:
    """Error of scales, and of values what is more than the rounding to fp8, both relative; NaN is wrong. dropped_TN: how far each may
    be off."""
    values_TN, scale_T = (np.asarray(array).astype(np.float64) for array in (got.values_TN, got.scale_T))
    largest_T = np.maximum(np.abs(exact_TN).max(axis=1), TINY)
    of_scales = np.abs(scale_T * LARGEST / largest_T - 1).max()
    expected_TN = exact_TN / largest_T[:, None] * LARGEST
    rounding_TN = _HALF_STEP * np.maximum(np.abs(expected_TN), _SMALLEST_NORMAL) + dropped_TN / largest_T[:, None] * LARGEST
    of_values = (np.abs(values_TN - expected_TN) - rounding_TN).max() / LARGEST
    return max(float(of_scales), float(of_values)) if np.isfinite(of_scales + of_values) else math.inf


def _depend(carry: Any, result: Any) -> jax.Array:
    """The arguments with one value changed, which depends on the results: else equal calls would be made once."""
    flat = carry.reshape(-1)
    added = sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in jax.tree.leaves(result)) * 1e-20
    return flat.at[0].add(added.astype(flat.dtype)).reshape(carry.shape)


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., float], int]] = {
    "add_norm_quantize": (_make_add_norm, _add_norm, _add_norm_error, 7),
    "silu_up_quantize": (_make_silu_up, _silu_up, _silu_up_error, 5),
    "quantize": (_make_plain, quantize, _plain_error, 3),
}
"""By name: what makes its arrays, the call, its error, and the bytes that it must read and write for each value in 16 bits."""
