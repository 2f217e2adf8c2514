"""Gumbel noise without state: what a row draws for a token depends on (seed, position, token id) and on nothing else.

Neither the batch, nor the order of its rows, nor the padding or sharding of the vocabulary can shift it, so a request
draws the same tokens alone, among strangers and after preemption.
"""

import jax
import jax.numpy as jnp


def gumbel_RV(seed_low_R: jax.Array, seed_high_R: jax.Array, position_R: jax.Array, vocab_size: int) -> jax.Array:
    """float32[R, V] standard Gumbel noise.

    Threefry makes two key words per row; a keyed hash of the token id makes the 32 bits of each column. The hash is
    elementwise, so that XLA fuses it into whatever consumes the noise and no [R, V] noise is written to memory.
    """
    key_R2 = jax.random.wrap_key_data(jnp.stack([seed_high_R, seed_low_R], axis=-1), impl="threefry2x32")
    words_R2 = jax.random.key_data(jax.vmap(jax.random.fold_in)(key_R2, position_R))
    token_RV = jax.lax.broadcasted_iota(jnp.uint32, (position_R.shape[0], vocab_size), 1)
    bits_RV = _scramble(_scramble(token_RV ^ words_R2[:, :1]) + words_R2[:, 1:])
    return gumbel_of_bits(bits_RV)


def gumbel_of_bits(bits: jax.Array) -> jax.Array:
    """Map uniform uint32 to standard Gumbel noise, finite for every input.

    Small bits become large noise: floats are finest near 0, so the upper tail, which decides draws, keeps steps of 2^-32
    in probability (up to 22.9), and only the lower tail is cut, at -2.8.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _scramble(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the result depends on every bit of the argument.

    Constants: Wellons, "Prospecting for Hash Functions" (2018), lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
