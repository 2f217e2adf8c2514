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
from pallas_kernels.gated_matmul import product

TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 5e-3}
"""Bound of the largest difference, relative to the largest result: one rounding to the type, and the exponential of the activation."""
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

    def __str__(self) -> str:
        return f"{self.width}x{self.hidden} {self.activation} {self.dtype}"


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A few tokens, and more than the two CTAs of a cluster compute at a time."""
    small = replace(shapes, hidden=min(shapes.hidden, _MAX_HIDDEN))
    return [case(small, num_tokens, (implementation,), interpret=interpret) for num_tokens in _NUM_TOKENS]


def case(shapes: Shapes, num_tokens: int, names: tuple[str, ...], *, interpret: bool, **more: Any) -> Case:
    """A step of so many tokens, the last of them padding, computed by these implementations."""
    call = functools.partial(product, activation=shapes.activation, interpret=interpret)
    variants: dict[str, Any] = {name: functools.partial(call, implementation=name) for name in names}
    make, error = functools.partial(host_arrays, shapes, num_tokens), functools.partial(host_error, shapes)
    return Case(f"{shapes}, {num_tokens} tokens", make, variants, error, TOLERANCE[shapes.dtype], **more)


def host_arrays(shapes: Shapes, num_tokens: int) -> tuple[np.ndarray, tuple[np.ndarray]]:
    """x, of whose tokens the last are NaN, and the weight."""
    normals = Normals()
    x_TD = normals.of(shapes.dtype, num_tokens, shapes.width)
    x_TD[_num_real(num_tokens) :] = np.nan
    weight_D2F = normals(shapes.width, 2, shapes.hidden) * np.float32(2 / math.sqrt(shapes.width))
    return x_TD, (weight_D2F.astype(x_TD.dtype),)


def _num_real(num_tokens: int) -> int:
    return max(1, num_tokens - _NUM_PADDING)


def host_error(shapes: Shapes, x: Any, constants: tuple[Any, ...], got: Any) -> float:
    """The largest difference of real tokens, relative to the largest result; NaN where one is not finite. Of many outputs some of every
    block are compared."""
    (weight_D2F,) = constants
    num_real, hidden = _num_real(len(x)), shapes.hidden
    got = np.asarray(got)[:num_real].astype(np.float64)
    outputs = np.arange(hidden) if hidden <= 8 * _STRIDE else np.unique(np.append(np.arange(0, hidden, _STRIDE), hidden - 1))
    if not np.isfinite(got).all():
        return math.nan
    wide = np.asarray(x)[:num_real].astype(np.float64)
    gate, up = (wide @ np.asarray(weight_D2F)[:, matrix, outputs].astype(np.float64) for matrix in range(2))
    expected = _ACTIVATIONS[shapes.activation](gate) * up
    return float(np.abs(got[:, outputs] - expected).max() / np.abs(expected).max())


def next_tokens(x: Any, result: Any) -> jax.Array:
    """x with one value changed, which depends on the result: else equal calls would be made once."""
    return x.at[0, 0].add((result[0, 0].astype(np.float32) * 1e-20).astype(x.dtype))


_ACTIVATIONS: dict[str, Any] = {
    "silu": lambda gate: gate / (1 + np.exp(-gate)),
    "gelu_tanh": lambda gate: 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
}
