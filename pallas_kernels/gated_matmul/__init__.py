"""The first half of a gated feed-forward layer: activation(x @ gate) * (x @ up), in one pass.

Shapes, common to all implementations:
    x_TD
    weight_D2F     gate and up, in the type of x
    result         [T, F] in the type of x

or of 8-bit floats with scales:
    x              `quantize.Quantized` vectors [T, D]
    values_2FD     float8_e4m3fn
    scale_2F       float32
    result         [T, F] in a type that is asked for

Sums and the activation are float32. Source: arXiv:2002.05202.
"""

import importlib
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.quantize.values import Quantized

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "Layer",
    "PREFERENCE",
    "candidates",
    "product",
    "scaled_product",
]

IMPLEMENTATIONS = {
    "mosaic": "pallas_kernels.gated_matmul.mosaic",
    "xla": "pallas_kernels.gated_matmul.xla",
}
"""Each module has product, scaled_product and supports(platform, dtype, width, hidden, is_scaled, interpret)."""


class Layer(NamedTuple):
    """A gated feed-forward layer."""

    width: int
    hidden: int
    activation: str
    is_scaled: bool = False
    """Whether both operands are 8-bit floats with scales."""


PREFERENCE = ("mosaic", "xla")


def product(
    x_TD: jax.Array,
    weight_D2F: jax.Array,
    *,
    activation: str = "silu",
    implementation: str,
    interpret: Any = False,
) -> jax.Array:
    """Hidden values of the layer.

    activation: a key of ACTIVATIONS. implementation: a key of IMPLEMENTATIONS.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes or types that do not fit together and for what the implementation does not take.
    """
    width, num_matrices, hidden = weight_D2F.shape
    if x_TD.shape[1:] != (width,) or num_matrices != 2 or x_TD.dtype != weight_D2F.dtype:
        raise ValueError(
            f"the weight is {list(weight_D2F.shape)} in {weight_D2F.dtype} for x {list(x_TD.shape)} in {x_TD.dtype}; "
            "gate and up are [D, 2, F] in the type of x [T, D]"
        )
    _check_activation(activation)
    module = _module(implementation, dtype=x_TD.dtype, width=width, hidden=hidden, interpret=interpret)
    return module.product(x_TD, weight_D2F, activation=activation, interpret=interpret)


def scaled_product(
    x: Quantized,
    values_2FD: jax.Array,
    scale_2F: jax.Array,
    *,
    dtype: DTypeLike,
    activation: str = "silu",
    implementation: str,
    interpret: Any = False,
) -> jax.Array:
    """As `product`, of operands in 8 bits."""
    _, hidden, width = values_2FD.shape
    if x.values_TN.shape[1:] != (width,) or scale_2F.shape != (2, hidden):
        raise ValueError(
            f"values are {list(values_2FD.shape)} and scales {list(scale_2F.shape)} for x {list(x.values_TN.shape)}; they are "
            "[2, F, D] and [2, F] for x [T, D]"
        )
    _check_activation(activation)
    case = {"dtype": dtype, "width": width, "hidden": hidden, "is_scaled": True, "interpret": interpret}
    module = _module(implementation, **case)
    return module.scaled_product(x, values_2FD, scale_2F, activation=activation, dtype=dtype, interpret=interpret)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r} of gated layers; there are {', '.join(ACTIVATIONS)}")


def _module(implementation: str, **case: Any) -> Any:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of gated products; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", **case):
        raise ValueError(
            f"implementation {implementation!r} of gated products does not take {case['width']} inputs and {case['hidden']} outputs in "
            f"{case['dtype']}; use 'xla'"
        )
    return module


def candidates(
    *, platform: str, dtype: DTypeLike, width: int, hidden: int, is_scaled: bool = False, interpret: bool = False
) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case. is_scaled: of `scaled_product`."""
    case = {
        "platform": platform,
        "dtype": dtype,
        "width": width,
        "hidden": hidden,
        "is_scaled": is_scaled,
        "interpret": interpret,
    }
    return tuple(name for name in PREFERENCE if importlib.import_module(IMPLEMENTATIONS[name]).supports(**case))
