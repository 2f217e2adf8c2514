"""In plain JAX, from the definition."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantize.values import DTYPE, LARGEST, TINY, Quantized, Sums


def supports(**case: Any) -> bool:
    return True


def add_norm_quantize(
    sums: Sums, residual_TD: jax.Array, weight_D: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, Quantized]:
    x_TD = (residual_TD.astype(jnp.float32) + sums.scaled(jnp.float32)).astype(residual_TD.dtype)
    number = jnp.finfo(x_TD.dtype)
    # A cast back would be taken out by the compiler.
    wide_TD = jax.lax.reduce_precision(x_TD.astype(jnp.float32), number.nexp, number.nmant)
    wide_TD = wide_TD * jax.lax.rsqrt(jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True) + eps)
    return x_TD, _quantized(wide_TD * weight_D.astype(jnp.float32))


def silu_up_quantize(sums: Sums, *, interpret: bool = False) -> Quantized:
    gate_up_T2F = sums.scaled(jnp.float32)
    return _quantized(jax.nn.silu(gate_up_T2F[:, 0]) * gate_up_T2F[:, 1])


def quantize(x_TN: jax.Array, *, interpret: bool = False) -> Quantized:
    return _quantized(x_TN.astype(jnp.float32))


def _quantized(wide_TN: jax.Array) -> Quantized:
    scale_T1 = jnp.maximum(jnp.max(jnp.abs(wide_TN), axis=-1, keepdims=True), TINY) / LARGEST
    return Quantized(jnp.clip(wide_TN / scale_T1, -LARGEST, LARGEST).astype(DTYPE), scale_T1[:, 0])
