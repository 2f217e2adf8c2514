"""The chain in plain JAX, rounded to the type of x after each product."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.product_chain.weights import Weights


def supports(**_: object) -> bool:
    return True


def chain(
    x_TA: jax.Array,
    residual_TD: jax.Array,
    weights: Weights,
    *,
    eps: float,
    upcoming: Sequence[jax.Array] = (),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    x, h = x_TA, residual_TD
    if weights.out_AD is not None:
        assert weights.mlp_norm_D is not None
        h = h + _product(x, weights.out_AD)
        x = norm(h, weights.mlp_norm_D, eps)
    gate_up = _product(x, weights.gate_up_DCF)
    h = h + _product(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], weights.down_FD)
    if weights.qkv_DQ is None:
        return h, None
    assert weights.next_norm_D is not None
    return h, _product(norm(h, weights.next_norm_D, eps), weights.qkv_DQ)


def norm(h_TD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """h / rms(h) * weight, in float32 but for the result."""
    wide = h_TD.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * weight_D.astype(jnp.float32)).astype(h_TD.dtype)


def _product(x_TK: jax.Array, weight: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x_TK.dtype == jnp.float32 else None
    return jnp.tensordot(x_TK, weight, 1, precision=precision)
