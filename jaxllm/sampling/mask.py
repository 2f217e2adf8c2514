"""Packed masks of the tokens that may be drawn: bit b of word w allows token 32 w + b."""

import jax
import jax.numpy as jnp

_BITS = 32


def num_words(vocab_size: int) -> int:
    """Number of mask words for this many columns of logits."""
    return -(-vocab_size // _BITS)


def apply_mask(logits_RV: jax.Array, mask_RW: jax.Array) -> jax.Array:
    """The logits, -inf where the mask (int32[R, W]) does not allow the token."""
    num_rows, vocab_size = logits_RV.shape
    words_RW = jax.lax.bitcast_convert_type(mask_RW, jnp.uint32)
    bits_RWB = (words_RW[:, :, None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & 1
    allowed_RV = bits_RWB.reshape(num_rows, -1)[:, :vocab_size] != 0
    return jnp.where(allowed_RV, logits_RV, -jnp.inf)
