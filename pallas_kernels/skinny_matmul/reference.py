"""The products and what stands around them in plain JAX: the truth for the kernels, and the way of every platform."""

import jax
import jax.numpy as jnp
from jax import lax


def supports(**_: object) -> bool:
    return True


def norm_matmul(
    x_TD: jax.Array,
    weight_DF: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    bias_F: jax.Array | None = None,
    weight_scale_F: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    return _product(_norm(x_TD, norm_weight_D, eps), weight_DF, weight_scale_F, bias_F).astype(x_TD.dtype)


def norm_gate_up(
    x_TD: jax.Array,
    weight_D2F: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    bias_2F: jax.Array | None = None,
    weight_scale_2F: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    gate_up_T2F = _product(_norm(x_TD, norm_weight_D, eps), weight_D2F, weight_scale_2F, bias_2F)
    return (jax.nn.silu(gate_up_T2F[:, 0]) * gate_up_T2F[:, 1]).astype(x_TD.dtype)


def matmul_residual(
    x_TF: jax.Array,
    weight_FD: jax.Array,
    residual_TD: jax.Array,
    *,
    bias_D: jax.Array | None = None,
    weight_scale_D: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    y_TD = _product(x_TF.astype(jnp.float32), weight_FD, weight_scale_D, bias_D)
    return (residual_TD.astype(jnp.float32) + y_TD).astype(residual_TD.dtype)


def norm_logits(
    x_TD: jax.Array,
    weight_VD: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    weight_scale_V: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    return _product(_norm(x_TD, norm_weight_D, eps), weight_VD.T, weight_scale_V, None)


def _norm(x_TD: jax.Array, norm_weight_D: jax.Array | None, eps: float) -> jax.Array:
    """x / rms(x) * weight, or x where there is no weight, in float32."""
    wide_TD = x_TD.astype(jnp.float32)
    if norm_weight_D is None:
        return wide_TD
    wide_TD = wide_TD * lax.rsqrt(jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True) + eps)
    return wide_TD * norm_weight_D.astype(jnp.float32)


def _product(x_TD: jax.Array, weight: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """In float32, as everything here."""
    y = jnp.tensordot(x_TD, weight.astype(jnp.float32), 1, precision=lax.Precision.HIGHEST)
    if scale is not None:
        y = y * scale.astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)
