"""Gumbel noise as a pure function of a row's two key words and a token id: the same in a kernel and in plain JAX."""

import jax
import jax.numpy as jnp


def gumbel_bits(token_id: jax.Array, word_0: jax.Array, word_1: jax.Array) -> jax.Array:
    """32 uniform bits of each token: a hash of its id (uint32) keyed by two uint32 words."""
    return scramble(scramble(token_id ^ word_0) + word_1)


def uniform_of_bits(bits: jax.Array) -> jax.Array:
    """Map uint32 into (0, 1), monotonely."""
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


def gumbel_of_bits(bits: jax.Array) -> jax.Array:
    """Map uniform uint32 to standard Gumbel noise, finite for every input.

    Small bits become large noise: floats are finest near 0, so the upper tail, which decides draws, keeps steps of 2^-32
    in probability (up to 22.9), and only the lower tail is cut, at -2.8.
    """
    return -jnp.log(-jnp.log1p(-uniform_of_bits(bits)))


def scramble(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the result depends on every bit of the argument.

    Constants: Wellons, "Prospecting for Hash Functions" (2018), lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
