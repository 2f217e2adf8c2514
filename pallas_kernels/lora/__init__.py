"""Low-rank changes of a matrix product (LoRA, arXiv:2106.09685), another one for each token.

Shapes, common to all implementations:
    x_TD          [T, D] what the product took
    y_TN          [T, N] its result
    slot_T        int32 [T]: the slot of the adapter of each token, in [0, S); -1: none
    a_SQD         [S, Q, D], Q = M * R: the rows of module m are m * R to m * R + R - 1
    b_SRN         [S, R, N]: each column belongs to one of the M modules, see `Parts`
    result        [T, N] in the type of y: y[t] + (a[slot_T[t], rows of m] @ x[t]) @ b[slot_T[t]] in the columns of m

Products are accumulated in float32; those with A may be rounded to the type of x, and the change to that of y before it is added.
Tokens without an adapter keep their y bit by bit, and the result of a token does not depend on the slots of others.

Dimension letters besides those of the package: D inputs, N outputs, S slots, R rank, M modules that are computed in one product.
"""

import importlib

import jax
from jax.typing import DTypeLike

from pallas_kernels.lora.groups import Groups, group
from pallas_kernels.lora.parts import Parts
from pallas_kernels.verified import is_verified

__all__ = ["IMPLEMENTATIONS", "PLAIN", "PREFERENCE", "Groups", "Parts", "add", "candidates", "choose", "group"]

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.lora.triton",
    "xla": "pallas_kernels.lora.xla",
    "reference": "pallas_kernels.lora.reference",
}
"""Each module has add and supports(platform, dtype, interpret)."""

PREFERENCE = ("triton", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def add(
    y_TN: jax.Array,
    x_TD: jax.Array,
    a_SQD: jax.Array,
    b_SRN: jax.Array,
    groups: Groups,
    *,
    parts: Parts,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """y plus the changes by the adapters of its tokens, [T, N].

    groups: of `group` for these tokens; all products of a step share it.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    _check_shapes(y_TN, x_TD, a_SQD, b_SRN, groups, parts)
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), dtype=x_TD.dtype)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of LoRA; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", dtype=x_TD.dtype, interpret=interpret):
        raise ValueError(f"implementation {implementation!r} of LoRA does not take activations in {x_TD.dtype}; use 'xla'")
    return module.add(y_TN, x_TD, a_SQD, b_SRN, groups, parts=parts, interpret=interpret)


def candidates(*, platform: str, dtype: DTypeLike, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    return tuple(name for name in PREFERENCE if modules[name].supports(platform=platform, dtype=dtype, interpret=interpret))


def choose(*, platform: str, dtype: DTypeLike) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "lora")
    return next(name for name in candidates(platform=platform, dtype=dtype) if trusted or name in PLAIN)


def _check_shapes(y_TN: jax.Array, x_TD: jax.Array, a_SQD: jax.Array, b_SRN: jax.Array, groups: Groups, parts: Parts) -> None:
    """Raise ValueError for the first array whose shape does not fit x_TD, b_SRN and parts."""
    (T, D), (S, R, _) = x_TD.shape, b_SRN.shape
    N = parts.num_columns
    expected = {
        "y_TN": (y_TN, (T, N)),
        "a_SQD": (a_SQD, (S, parts.num_modules * R, D)),
        "b_SRN": (b_SRN, (S, R, N)),
        "slot_T": (groups.slot_T, (T,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)} for x_TD {list(x_TD.shape)} and {parts}")
