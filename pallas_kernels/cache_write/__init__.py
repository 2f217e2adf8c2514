"""Writes new keys and values into a paged cache by an XLA scatter, in place when the caches are donated (on CPUs see bits.py).

Beside rotation and norm it is part of one kernel: `rope_cache_write`.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.cache_write.bits import as_stored, value_type

LARGEST_FP8 = 448.0


def write_cache(
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The pools of pages with one key and value per token written into their slots, int32: page * S + offset.

    A negative slot is dropped (padding). No slot may appear twice, the result there would be either token.
    k_scale, v_scale: float32 scalars that keys and values are divided by; None: nothing. A float8_e4m3fn cache gets the nearest
    value, and the largest, 448, for what lies beyond it.
    """
    num_pages, _, page_size, _ = k_pages_PKSH.shape
    page_T = jnp.where(slot_T < 0, num_pages, slot_T // page_size)  # past the end: dropped
    offset_T = jnp.maximum(slot_T, 0) % page_size

    def write(pages_PKSH: jax.Array, x_TKH: jax.Array, scale: ArrayLike | None) -> jax.Array:
        new_TKH = as_stored(to_cache_type(x_TKH, value_type(pages_PKSH.dtype), scale), pages_PKSH.dtype)
        return pages_PKSH.at[page_T, :, offset_T].set(new_TKH, mode="drop")

    return write(k_pages_PKSH, k_TKH, k_scale), write(v_pages_PKSH, v_TKH, v_scale)


def to_cache_type(x: jax.Array, dtype: DTypeLike, scale: ArrayLike | None) -> jax.Array:
    """Divided by the scale, and rounded to a value of the cache's type; float8_e4m3fn has no infinity but NaN beyond its largest."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if jnp.dtype(dtype) == jnp.float8_e4m3fn:
        x = jnp.clip(x.astype(jnp.float32), -LARGEST_FP8, LARGEST_FP8)
    return x.astype(dtype)
