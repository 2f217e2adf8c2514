"""Floats as integers in the same order, so that a float can be searched for bit by bit."""

import jax
import jax.numpy as jnp

_MINUS_INF_KEY = 0x007FFFFF


def value_of_key(key: jax.Array) -> jax.Array:
    """The float32 of a uint32 key, where larger keys are larger floats; keys below that of -inf are -inf."""
    key = jnp.maximum(key, jnp.uint32(_MINUS_INF_KEY))
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(0x80000000), ~key)
    # Devices differ in whether a subnormal equals 0 in comparisons, so none is ever a candidate.
    bits = jnp.where(bits & jnp.uint32(0x7F800000) == 0, jnp.uint32(0), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
