"""The dense layers between two attentions, for few rows: products, each of what the one before returns.

Shapes, common to all implementations:
    x_TA          [T, A] attention's result, or without `out_AD` [T, D] the normed hidden states
    residual_TD   [T, D] what the first sum is added to: the hidden states before the norm
    result        (h [T, D], queries, keys and values [T, Q] or None)

With all weights: h' = residual + x @ out; h = h' + down(silu(gate(n)) * up(n)) with n = norm(h'); q = norm(h) @ qkv. Norms are h / rms(h)
times a weight. Products are accumulated in float32. A row's result depends on that row alone.

"mosaic" computes all in one kernel, which reads the weights without a pause between the products. Two chains of a program must not run
at once: one has to need a result of the other.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.product_chain.weights import Weights
from pallas_kernels.verified import is_verified

__all__ = ["IMPLEMENTATIONS", "PLAIN", "PREFERENCE", "Weights", "candidates", "chain", "choose", "widths_of"]

IMPLEMENTATIONS = {
    "mosaic": "pallas_kernels.product_chain.mosaic",
    "xla": "pallas_kernels.product_chain.xla",
    "reference": "pallas_kernels.product_chain.reference",
}
"""Each module has chain and supports(platform, dtype, num_rows, widths, interpret)."""

PREFERENCE = ("mosaic", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def chain(
    x_TA: jax.Array,
    residual_TD: jax.Array,
    weights: Weights,
    *,
    eps: float,
    upcoming: Sequence[jax.Array] = (),
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """(h, queries, keys and values) as the module's docstring says, in the type of x.

    eps: added to the mean of the squares. upcoming: what later products read first, such as the next layer's `out_AD`; a kernel brings the
    first of it into the cache while it waits. implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for weights that do not fit together and for what the implementation does not take.
    """
    widths = widths_of(x_TA, weights)
    case: dict[str, Any] = {"dtype": x_TA.dtype, "num_rows": x_TA.shape[0], "widths": widths}
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **case)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of chains of products; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", interpret=interpret, **case):
        raise ValueError(
            f"implementation {implementation!r} of chains of products does not take {x_TA.shape[0]} rows of {x_TA.dtype} with "
            f"widths {', '.join(map(str, widths))} here; use 'xla'"
        )
    return module.chain(x_TA, residual_TD, weights, eps=eps, upcoming=upcoming, interpret=interpret)  # type: ignore[no-any-return]


def widths_of(x_TA: jax.Array, weights: Weights) -> tuple[int, ...]:
    """Inputs, width, hidden values and, if there are, queries, keys and values. Raises ValueError for weights that do not fit."""
    D, _, F = weights.gate_up_DCF.shape
    shapes: list[tuple[str, Any, tuple[int, ...]]] = [
        ("gate_up_DCF", weights.gate_up_DCF, (D, 2, F)),
        ("down_FD", weights.down_FD, (F, D)),
    ]
    if (weights.out_AD is None) != (weights.mlp_norm_D is None) or (weights.qkv_DQ is None) != (weights.next_norm_D is None):
        raise ValueError("out_AD comes with mlp_norm_D, and qkv_DQ with next_norm_D")
    if weights.out_AD is not None:
        shapes += [("out_AD", weights.out_AD, (x_TA.shape[1], D)), ("mlp_norm_D", weights.mlp_norm_D, (D,))]
    elif x_TA.shape[1] != D:
        raise ValueError(f"x has {x_TA.shape[1]} values a row, but gate_up_DCF takes {D}")
    if weights.qkv_DQ is not None:
        shapes += [("qkv_DQ", weights.qkv_DQ, (D, weights.qkv_DQ.shape[1])), ("next_norm_D", weights.next_norm_D, (D,))]
    for name, weight, expected in shapes:
        if weight.shape != expected or weight.dtype != x_TA.dtype:
            raise ValueError(f"{name} is {weight.dtype} {list(weight.shape)}; x asks for {x_TA.dtype} {list(expected)}")
    return (x_TA.shape[1], D, F, *([weights.qkv_DQ.shape[1]] if weights.qkv_DQ is not None else []))


def candidates(
    *, platform: str, dtype: DTypeLike, num_rows: int, widths: Sequence[int], interpret: bool = False
) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    case = {"platform": platform, "dtype": dtype, "num_rows": num_rows, "widths": widths, "interpret": interpret}
    return tuple(name for name in PREFERENCE if modules[name].supports(**case))


def choose(*, platform: str, dtype: DTypeLike, num_rows: int, widths: Sequence[int]) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "product_chain")
    found = candidates(platform=platform, dtype=dtype, num_rows=num_rows, widths=widths)
    return next(name for name in found if trusted or name in PLAIN)
