"""The operands of products in 8-bit floats: quantisation of vectors, in one pass with what is computed between two products.

Shapes, common to all implementations; types are `values.Quantized` and `values.Sums`:
    sums          a product with none of its scales applied: [T, D], or [T, 2, F] of gate and up
    residual_TD   what the product is added to; the result has its type
    weight_D      of an RMS norm

All is computed in float32; of what is between, only the new residual is rounded. A scale is the largest absolute value of a
vector, divided by 448 (arXiv:2209.05433); that of a vector with NaN and its values may be anything.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.quantize.values import Quantized, Sums, scaled

__all__ = [
    "IMPLEMENTATIONS",
    "PREFERENCE",
    "Quantized",
    "Sums",
    "add_norm_quantize",
    "candidates",
    "quantize",
    "scaled",
    "silu_up_quantize",
]

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.quantize.triton",
    "xla": "pallas_kernels.quantize.xla",
}
"""Each module has the three functions and supports(platform, dtype, widths, interpret). `reference` is in NumPy, for the host."""

PREFERENCE = ("triton", "xla")


def add_norm_quantize(
    sums: Sums,
    residual_TD: jax.Array,
    weight_D: jax.Array,
    *,
    eps: float,
    implementation: str,
    interpret: bool = False,
) -> tuple[jax.Array, Quantized]:
    """(residual + the scaled sums, the RMS norm of that, quantised). eps: added to the mean of the squares."""
    module = _module(implementation, residual_TD.dtype, residual_TD.shape[1], interpret)
    return module.add_norm_quantize(sums, residual_TD, weight_D, eps=eps, interpret=interpret)


def silu_up_quantize(sums: Sums, *, implementation: str, interpret: bool = False) -> Quantized:
    """silu(gate) * up of the scaled sums, [T, 2, F] to [T, F], quantised."""
    module = _module(implementation, sums.values.dtype, sums.values.shape[2], interpret)
    return module.silu_up_quantize(sums, interpret=interpret)


def quantize(x_TN: jax.Array, *, implementation: str, interpret: bool = False) -> Quantized:
    """Vectors as they are, quantised."""
    return _module(implementation, x_TN.dtype, x_TN.shape[1], interpret).quantize(x_TN, interpret=interpret)


def _module(implementation: str, dtype: DTypeLike, width: int, interpret: bool) -> Any:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of quantisation; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", dtype=dtype, widths=(width,), interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of quantisation does not take vectors of {width} values in {dtype}; use 'xla'"
        )
    return module


def candidates(*, platform: str, dtype: DTypeLike, widths: Sequence[int], interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take vectors of these widths, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    case = {"platform": platform, "dtype": dtype, "widths": widths, "interpret": interpret}
    return tuple(name for name in PREFERENCE if modules[name].supports(**case))
