"""The cache write as an XLA scatter: the plain truth, and in place on every platform when the caches are donated."""

import jax
import jax.numpy as jnp


def supports(**_: object) -> bool:
    return True


def write_cache(
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slot_T: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    num_pages, _, page_size, _ = k_pages_PKSH.shape
    page_T = jnp.where(slot_T < 0, num_pages, slot_T // page_size)  # past the end: dropped
    offset_T = jnp.maximum(slot_T, 0) % page_size

    def write(pages_PKSH: jax.Array, x_TKH: jax.Array) -> jax.Array:
        return pages_PKSH.at[page_T, :, offset_T].set(x_TKH.astype(pages_PKSH.dtype), mode="drop")

    return write(k_pages_PKSH, k_TKH), write(v_pages_PKSH, v_TKH)
