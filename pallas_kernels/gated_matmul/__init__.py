"""The first half of a gated feed-forward layer: activation(x @ gate) * (x @ up), in one pass.

Shapes, common to all implementations:
    x_TD
    weight_D2F     gate and up, in the type of x
    result         [T, F] in the type of x

Sums and the activation are float32. Source: arXiv:2002.05202.
"""

import importlib
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.activation import ACTIVATIONS

__all__ = ["ACTIVATIONS", "IMPLEMENTATIONS", "PREFERENCE", "candidates", "product"]

IMPLEMENTATIONS = {
    "mosaic": "pallas_kernels.gated_matmul.mosaic",
    "xla": "pallas_kernels.gated_matmul.xla",
}
"""Each module has product and supports(platform, dtype, width, hidden, interpret)."""

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
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r} of gated layers; there are {', '.join(ACTIVATIONS)}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of gated products; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", dtype=x_TD.dtype, width=width, hidden=hidden, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of gated products does not take {width} inputs and {hidden} outputs in {x_TD.dtype}; use "
            "'xla'"
        )
    return module.product(x_TD, weight_D2F, activation=activation, interpret=interpret)


def candidates(*, platform: str, dtype: DTypeLike, width: int, hidden: int, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    case = {"platform": platform, "dtype": dtype, "width": width, "hidden": hidden, "interpret": interpret}
    return tuple(name for name in PREFERENCE if importlib.import_module(IMPLEMENTATIONS[name]).supports(**case))
