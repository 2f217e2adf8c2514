"""Weights of experts in 4 bits: MXFP4, 32 values along the inputs share a scale that is a power of two.

A value is a sign, two bits of exponent and one of mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Four of a block, 8 places apart,
lie in a word of 16 bits so that a shift and a mask make each the bits of a bfloat16 of 2^-126 times its size; those of two
neighbouring words in one register:

    value of the block      bits of word p (sign, exponent, mantissa)
    p                       15, 8 7 6
    p + 8                   12, 5 4 3       shifted by 3 as the first
    p + 16                   9, 2 1 0       shifted by 6 as the first
    p + 24                  14, 13 11 10    what is left

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

DTYPE = jnp.dtype(jnp.float4_e2m1fn)
MAX_PAIRS_OF_EXPERT = 192
"""On average: of more, products with weights that are widened first are faster."""
BLOCK = 32
"""Values that share a scale."""
WORD = 4
"""Values in a word."""
WORDS = BLOCK // WORD
SCALE_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits of a value; the fourth is the sign."""
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
"""Bits of a word that hold sign, exponent and mantissa of its values."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """A weight [..., N, K] in 4 bits, K a multiple of 32."""

    words: jax.Array
    """uint16 [..., N, K / 4]"""
    exponents: jax.Array
    """uint8 [..., K / 32, N]: of the scales, which are 2^(exponent - 127). Those of neighbouring outputs are read together."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-1], WORD * self.words.shape[-1])

    @property
    def dtype(self) -> Any:
        """That of a value."""
        return DTYPE

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: Any) -> "Mxfp4":
        """The part at indices of leading dimensions."""
        return Mxfp4(self.words[index], self.exponents[index])

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """The values; exact in float32 and bfloat16."""
        exponents = self.exponents.swapaxes(-1, -2).astype(jnp.int32)
        values = jnp.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], jnp.float32)[_codes(self.words)]
        return jnp.ldexp(values, exponents[..., None] - SCALE_BIAS).astype(dtype).reshape(self.shape)


def is_few(num_pairs: int, num_experts: int) -> bool:
    """Whether a kernel that widens weights in registers is the faster one."""
    return num_pairs <= MAX_PAIRS_OF_EXPERT * num_experts


def pack(blocks: jax.Array) -> jax.Array:
    """Words uint16 [..., K / 4] of blocks as checkpoints hold them: uint8 [..., K / 32, 16], two values a byte, the lower half first."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.uint16).reshape(*blocks.shape[:-1], WORD, WORDS)
    words = jnp.zeros((*blocks.shape[:-1], WORDS), jnp.uint16)
    for value, places in enumerate(PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            words |= (codes[..., value, :] >> bit & 1) << place
    return words.reshape(*blocks.shape[:-2], -1)


def unpack(words: jax.Array) -> jax.Array:
    """The blocks of `pack`."""
    codes = _codes(words).astype(jnp.uint8).reshape(*words.shape[:-1], -1, BLOCK // 2, 2)
    return codes[..., 0] | codes[..., 1] << 4


def _codes(words: jax.Array) -> jax.Array:
    """uint16 [..., K / 32, 32]: the values of words, as 4 bits each."""
    words = words.reshape(*words.shape[:-1], -1, WORDS)
    found = [sum((words >> place & 1) << bit for bit, place in zip((3, 2, 1, 0), places, strict=True)) for places in PLACES]
    return jnp.concatenate(found, axis=-1)
