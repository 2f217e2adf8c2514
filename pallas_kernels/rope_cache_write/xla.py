"""The plain truth, step by step; XLA makes a kernel or two of each step."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.cache_write import write_cache


def supports(**_: object) -> bool:
    return True


def rope_and_write(
    qkv_TKGH: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    slot_T: jax.Array,
    *,
    q_norm_H: jax.Array | None = None,
    k_norm_H: jax.Array | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_TKGH, k_TKH, v_TKH = rotated_heads(
        qkv_TKGH, cos_TH, sin_TH, q_norm_H=q_norm_H, k_norm_H=k_norm_H, eps=eps, norm_offset=norm_offset
    )
    caches = write_cache(k_pages_PKSH, v_pages_PKSH, k_TKH, v_TKH, slot_T, k_scale=k_scale, v_scale=v_scale)
    return q_TKGH, *caches


def rotated_heads(
    qkv_TKGH: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    *,
    q_norm_H: jax.Array | None = None,
    k_norm_H: jax.Array | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, K, G, H] and keys [T, K, H], normed where there are weights and rotated, and values [T, K, H]."""
    q_TKGH, k_TKH, v_TKH = qkv_TKGH[:, :, :-2], qkv_TKGH[:, :, -2], qkv_TKGH[:, :, -1]
    if q_norm_H is not None and k_norm_H is not None:
        norm = functools.partial(rms_norm, eps=eps, offset=norm_offset)
        q_TKGH, k_TKH = norm(q_TKGH, q_norm_H), norm(k_TKH, k_norm_H)
    return apply_rope(q_TKGH, (cos_TH, sin_TH)), apply_rope(k_TKH, (cos_TH, sin_TH)), v_TKH


def rms_norm(x: jax.Array, weight_H: jax.Array, *, eps: float, offset: float = 0.0) -> jax.Array:
    """x / rms(x) * (weight + offset) over the last dimension, in float32, returned in the type of x. Source: arXiv:1910.07467."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight_H = weight_H.astype(jnp.float32)
    return (wide * (weight_H + offset if offset else weight_H)).astype(x.dtype)


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate [T, ..., H] by the (cos, sin) [T, H/2] of its tokens; value i turns with value i + H/2. Computed in float32."""
    cos, sin = (a.reshape(a.shape[0], *(1,) * (x.ndim - 2), a.shape[1]) for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
