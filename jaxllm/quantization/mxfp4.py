"""MXFP4: 4-bit floats (e2m1), two in a byte, 32 of which share a scale that is a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

import jax.numpy as jnp
from jax import Array

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits; the fourth is the sign."""
SCALE_BIAS = 127


def widen(blocks: Array, scales: Array, dtype: str) -> Array:
    """The values [..., 32 B] of blocks, uint8 [..., B, 16], and the exponents of their scales, uint8 [..., B].

    The lower half of a byte comes first.
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, -1)
    values = jnp.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], jnp.float32)[codes]
    wide = jnp.ldexp(values, scales.astype(jnp.int32)[..., None] - SCALE_BIAS)
    return wide.astype(dtype).reshape(*scales.shape[:-1], -1)
