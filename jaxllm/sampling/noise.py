"""Stateless Gumbel noise: a row's noise for a token depends only on (seed, position, token id).

It does not depend on the batch, the order of its rows, or the padding or sharding of the vocabulary, so a request draws
the same tokens alone, in any batch and after preemption.
"""

import enum

import jax
import jax.numpy as jnp

from pallas_kernels.sampling.noise import gumbel_bits, gumbel_of_bits, uniform_of_bits


class Stream(enum.IntEnum):
    """Purposes of noise; the noise of each is independent of the others'."""

    TARGET = 0
    """The model's own draw."""
    DRAFT = 1
    ACCEPTANCE = 2


def gumbel_RV(
    seed_low_R: jax.Array, seed_high_R: jax.Array, position_R: jax.Array, vocab_size: int, stream: Stream = Stream.TARGET
) -> jax.Array:
    """float32[R, V] standard Gumbel noise.

    Threefry makes two key words per row; a keyed hash of the token id makes the 32 bits of each column. The hash is
    elementwise, so that XLA fuses it into whatever consumes the noise and no [R, V] noise is written to memory.
    """
    words_R2 = key_words(seed_low_R, seed_high_R, position_R, stream)
    token_RV = jax.lax.broadcasted_iota(jnp.uint32, (position_R.shape[0], vocab_size), 1)
    return gumbel_of_bits(gumbel_bits(token_RV, words_R2[:, :1], words_R2[:, 1:]))


def uniform_R(seed_low_R: jax.Array, seed_high_R: jax.Array, position_R: jax.Array) -> jax.Array:
    """float32[R] in (0, 1), of the stream ACCEPTANCE."""
    return uniform_of_bits(key_words(seed_low_R, seed_high_R, position_R, Stream.ACCEPTANCE)[:, 0])


def key_words(
    seed_low_R: jax.Array, seed_high_R: jax.Array, position_R: jax.Array, stream: Stream = Stream.TARGET
) -> jax.Array:
    """uint32[R, 2]: the key of a row's noise."""
    key_R2 = jax.random.wrap_key_data(jnp.stack([seed_high_R, seed_low_R], axis=-1), impl="threefry2x32")
    key_R2 = jax.vmap(jax.random.fold_in)(key_R2, position_R)
    if stream != Stream.TARGET:
        key_R2 = jax.vmap(lambda key: jax.random.fold_in(key, int(stream)))(key_R2)
    return jax.random.key_data(key_R2)
