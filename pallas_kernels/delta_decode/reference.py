"""A decode of linear attention in plain JAX, step by step as its definition says."""

import jax
import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels.delta_decode.window import moved_on, unless_padding, window_of


def supports(*, platform: str, key_dim: int, value_dim: int, interpret: bool = False) -> bool:
    return True


def delta_decode(
    qkvz_RKC: jax.Array,
    ba_RKC: jax.Array,
    conv_weight_KCJ: jax.Array,
    log_rate_KG: jax.Array,
    rate_bias_KG: jax.Array,
    norm_weight_V: jax.Array,
    conv_state_NKjC: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    gate: str,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the package."""
    (R, K, _), (_, _, G, H, V), C = qkvz_RKC.shape, state_NKGHV.shape, conv_weight_KCJ.shape[1]
    window_RKJC = window_of(qkvz_RKC[..., :C], conv_state_NKjC, row_R, is_new_R)
    y_RKC = jax.nn.silu(jnp.einsum("rkjc,kcj->rkc", *_wide(window_RKJC, conv_weight_KCJ), precision=Precision.HIGHEST))
    q_RKH, k_RKH, v_RKC = jnp.split(y_RKC, [H, 2 * H], axis=2)
    q_RKH, k_RKH = _normed(q_RKH) * H**-0.5, _normed(k_RKH)
    v_RKGV, z_RKGV = (x.reshape(R, K, G, V) for x in _wide(v_RKC, qkvz_RKC[..., C:]))
    b_RKG, a_RKG = jnp.split(ba_RKC.astype(jnp.float32), 2, axis=2)
    decay_RKG = jnp.exp(-jnp.exp(log_rate_KG) * jax.nn.softplus(a_RKG + rate_bias_KG))

    state_RKGHV = jnp.where(is_new_R[:, None, None, None, None], 0, state_NKGHV[row_R]) * decay_RKG[..., None, None]
    known_RKGV = jnp.einsum("rkh,rkghv->rkgv", k_RKH, state_RKGHV, precision=Precision.HIGHEST)
    added_RKGV = jax.nn.sigmoid(b_RKG)[..., None] * (v_RKGV - known_RKGV)
    state_RKGHV += k_RKH[:, :, None, :, None] * added_RKGV[:, :, :, None]
    out_RKGV = jnp.einsum("rkh,rkghv->rkgv", q_RKH, state_RKGHV, precision=Precision.HIGHEST)

    out_RKGV *= jax.lax.rsqrt(jnp.mean(jnp.square(out_RKGV), axis=-1, keepdims=True) + eps) * norm_weight_V.astype(jnp.float32)
    out_RKGV *= jax.nn.sigmoid(z_RKGV) if gate == "sigmoid" else jax.nn.silu(z_RKGV)
    state_RKGHV = unless_padding(state_RKGHV, row_R, state_NKGHV)
    states = moved_on(window_RKJC, conv_state_NKjC, row_R), state_NKGHV.at[row_R].set(state_RKGHV)
    return out_RKGV.astype(qkvz_RKC.dtype), *states


def _wide(*arrays: jax.Array) -> list[jax.Array]:
    return [array.astype(jnp.float32) for array in arrays]


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
