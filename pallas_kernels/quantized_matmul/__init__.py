"""Products with weights of 4 or 8 bits, which are widened in registers: activations stay in their type.

Shapes, common to all implementations:
    x_TK     [T, K] activations
    weight   `Packed`, made by `pack`: outputs and inputs padded to multiples of 64
    result   [T, N] in the type of x or in float32, N the padded outputs; those of padding are 0

Products are accumulated in float32. Scales of groups, and the weight's values with them, may be rounded to bfloat16 before they are
multiplied. A row's result depends on that row alone: rows of padding may hold anything.

Dimension letters besides those of the package: N outputs, K inputs, G groups of inputs that share a scale, M rows of a tile.
"""

import importlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.packed import (
    GROUPS,
    TILE,
    Packed,
    decoder_of,
    pack,
    pack_words,
    unpack_words,
    widened,
)
from pallas_kernels.verified import is_verified

__all__ = [
    "DECODERS",
    "GROUPS",
    "IMPLEMENTATIONS",
    "PLAIN",
    "PREFERENCE",
    "TILE",
    "Packed",
    "candidates",
    "choose",
    "decoder_of",
    "pack",
    "pack_words",
    "product",
    "unpack_words",
    "widened",
]

IMPLEMENTATIONS = {
    "mosaic": "pallas_kernels.quantized_matmul.mosaic",
    "xla": "pallas_kernels.quantized_matmul.xla",
    "reference": "pallas_kernels.quantized_matmul.reference",
}
"""Each module has product and supports(platform, dtype, interpret)."""

PREFERENCE = ("mosaic", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def product(
    x_TK: jax.Array,
    weight: Packed,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x @ weight.T, [T, N].

    x may have fewer inputs than the padded weight. dtype: float32 or that of x, which is the default. implementation: a key of
    IMPLEMENTATIONS, or None for `choose` on the default backend. interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    missing = weight.num_inputs - x_TK.shape[1]
    if not 0 <= missing < TILE:
        raise ValueError(
            f"x_TK is {list(x_TK.shape)}, but the weight has {weight.num_inputs} inputs, of which fewer than {TILE} are padding"
        )
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), dtype=x_TK.dtype)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of quantized products; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", dtype=x_TK.dtype, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of quantized products does not take activations in {x_TK.dtype} here; use 'xla'"
        )
    return module.product(jnp.pad(x_TK, ((0, 0), (0, missing))), weight, dtype=dtype, interpret=interpret)


def candidates(*, platform: str, dtype: DTypeLike, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    return tuple(name for name in PREFERENCE if modules[name].supports(platform=platform, dtype=dtype, interpret=interpret))


def choose(*, platform: str, dtype: DTypeLike) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "quantized_matmul")
    return next(name for name in candidates(platform=platform, dtype=dtype) if trusted or name in PLAIN)
