"""Gate, up and the activation in one pass: near what NumPy computes in float64.

Tokens of padding are NaN and must reach no other token.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.gated_matmul import product, scaled_product
from pallas_kernels.quantize.values import DTYPE, Quantized

TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 5e-3}
"""Bound of the largest difference, relative to the largest result: one rounding to the type, and the exponential of the activation."""
FP8_TOLERANCE = 1e-2
"""TOLERANCE of bfloat16, and what Hopper's tensor cores leave out of sums of 8-bit floats, of which they keep 14 bits: up to 5.7e-3 was
measured on an H200, where XLA's product of the one case that was compared was off by 2.9e-3 and the kernel by 3.5e-3."""
_NUM_TOKENS = (5, 300)
"""A part of a tile; and more than a pair of tiles. At an engine's start."""
_MAX_HIDDEN = 1 << 10
"""Outputs at an engine's start: blocks of outputs are computed alike."""
_STRIDE = 61
"""Outputs that are compared, of many: some of every block, at changing places of it."""
_NUM_PADDING = 3


@dataclass(frozen=True)
class Shapes:
    """A gated feed-forward layer on one device."""

    dtype: str
    width: int
    hidden: int
    activation: str = "silu"
    is_scaled: bool = False
    """Whether both operands are 8-bit floats with scales."""

    def __str__(self) -> str:
        return f"{self.width}x{self.hidden} {self.activation} {self.dtype}{' of fp8' * self.is_scaled}"


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A few tokens, and more than the two CTAs of a cluster compute at a time."""
    small = replace(shapes, hidden=min(shapes.hidden, _MAX_HIDDEN))
    return [case(small, num_tokens, (implementation,), interpret=interpret) for num_tokens in _NUM_TOKENS]


def case(shapes: Shapes, num_tokens: int, names: tuple[str, ...], *, interpret: bool, **more: Any) -> Case:
    """A step of so many tokens, the last of them padding, computed by these implementations."""
    options: dict[str, Any] = {"activation": shapes.activation, "interpret": interpret}
    call = (
        functools.partial(_scaled, dtype=shapes.dtype, **options) if shapes.is_scaled else functools.partial(product, **options)
    )
    variants: dict[str, Any] = {name: functools.partial(call, implementation=name) for name in names}
    make, error = functools.partial(host_arrays, shapes, num_tokens), functools.partial(host_error, shapes)
    tolerance = FP8_TOLERANCE if shapes.is_scaled else TOLERANCE[shapes.dtype]
    return Case(f"{shapes}, {num_tokens} tokens", make, variants, error, tolerance, **more)


def _scaled(values_TD: Any, scale_T: Any, weight_2FD: Any, scale_2F: Any, **options: Any) -> Any:
    return scaled_product(Quantized(values_TD, scale_T), weight_2FD, scale_2F, **options)


def host_arrays(shapes: Shapes, num_tokens: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """x, of whose tokens the last are NaN, and the weight; of 8-bit floats (x, (its scales, weight, its scales))."""
    normals, deviation = Normals(), np.float32(2 / math.sqrt(shapes.width))
    x_TD = normals(num_tokens, shapes.width)
    x_TD[_num_real(num_tokens) :] = np.nan
    if not shapes.is_scaled:
        weight_D2F = normals(shapes.width, 2, shapes.hidden) * deviation
        return x_TD.astype(shapes.dtype), (weight_D2F.astype(shapes.dtype),)
    scale_T, scale_2F = (np.abs(normals(*shape)) / 2 + np.float32(0.5) for shape in ((num_tokens,), (2, shapes.hidden)))
    weight_2FD = normals(2, shapes.hidden, shapes.width) * 16
    return (x_TD * 16).astype(DTYPE), (scale_T / 16, weight_2FD.astype(DTYPE), scale_2F * deviation / 16)


def _num_real(num_tokens: int) -> int:
    return max(1, num_tokens - _NUM_PADDING)


def host_error(shapes: Shapes, x: Any, constants: tuple[Any, ...], got: Any) -> float:
    """The largest difference of real tokens, relative to the largest result; NaN where one is not finite. Of many outputs some of every
    block are compared."""
    num_real, hidden = _num_real(len(x)), shapes.hidden
    got = np.asarray(got)[:num_real].astype(np.float64)
    outputs = np.arange(hidden) if hidden <= 8 * _STRIDE else np.unique(np.append(np.arange(0, hidden, _STRIDE), hidden - 1))
    if not np.isfinite(got).all():
        return math.nan
    wide = np.asarray(x)[:num_real].astype(np.float64)
    if shapes.is_scaled:
        scale_T, weight_2FD, scale_2F = map(np.asarray, constants)
        wide = wide * scale_T[:num_real, None]
        weights = [weight_2FD[matrix, outputs].astype(np.float64).T * scale_2F[matrix, outputs] for matrix in range(2)]
    else:
        weights = [np.asarray(constants[0])[:, matrix, outputs].astype(np.float64) for matrix in range(2)]
    gate, up = (wide @ weight for weight in weights)
    expected = _ACTIVATIONS[shapes.activation](gate) * up
    return float(np.abs(got[:, outputs] - expected).max() / np.abs(expected).max())


def next_tokens(x: Any, result: Any) -> jax.Array:
    """x with one value changed, which depends on the result: else equal calls would be made once."""
    return x.at[0, 0].add((result[0, 0].astype(np.float32) * 1e-20).astype(x.dtype))


_ACTIVATIONS: dict[str, Any] = {
    "silu": lambda gate: gate / (1 + np.exp(-gate)),
    "gelu_tanh": lambda gate: 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
}
