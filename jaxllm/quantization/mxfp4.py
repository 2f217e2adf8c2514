"""MXFP4: 4-bit floats (e2m1), two in a byte, 32 of which share a scale that is a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from pallas_kernels.grouped_matmul.mxfp4 import MAGNITUDES, SCALE_BIAS, Mxfp4

VALUE_BYTES = 17 / 32
"""With its share of the scale."""
LARGEST_EXPONENT = 191
"""Of a scale with which kernels can compute: 2^64."""


class Mxfp4Weight(nnx.Module):
    """A weight in 4 bits as kernels read it: stands where the array stood."""

    def __init__(self, words: nnx.Param, exponents: nnx.Param):
        self.words = words
        self.exponents = exponents

    def __getitem__(self, index: object) -> Mxfp4:
        """As of a parameter: `weight[...]`."""
        return Mxfp4(self.words[...], self.exponents[...])[index]


def widen(blocks: Array, scales: Array, dtype: str) -> Array:
    """The values [..., 32 B] of blocks, uint8 [..., B, 16], and the exponents of their scales, uint8 [..., B].

    The lower half of a byte comes first.
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, -1)
    values = jnp.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], jnp.float32)[codes]
    wide = jnp.ldexp(values, scales.astype(jnp.int32)[..., None] - SCALE_BIAS)
    return wide.astype(dtype).reshape(*scales.shape[:-1], -1)
