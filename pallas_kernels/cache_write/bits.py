"""Caches of narrow floats, kept as unsigned integers of the same bits.

To write a few values of float8_e4m3fn, and with JAX 0.10 of bfloat16, XLA on a CPU converts the whole array to a wider type and back;
integers it writes in place. Implementations in plain JAX take caches of both kinds, kernels only caches of floats.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_FLOATS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}
_BITS = {float_type: bits for bits, float_type in _FLOATS.items()}


def bits_type(dtype: DTypeLike) -> jnp.dtype:
    """The type that holds the bits of such floats: an unsigned integer for bfloat16 and float8_e4m3fn, for others themselves."""
    return _BITS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def value_type(dtype: DTypeLike) -> jnp.dtype:
    """The type of the floats that a cache of `dtype` holds."""
    return _FLOATS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def as_stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Floats of `value_type(dtype)` as a cache of `dtype` holds them."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def as_values(x: jax.Array) -> jax.Array:
    """What was read from a cache, as floats."""
    return x if x.dtype == value_type(x.dtype) else lax.bitcast_convert_type(x, value_type(x.dtype))
