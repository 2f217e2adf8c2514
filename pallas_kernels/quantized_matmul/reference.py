"""The plain truth: everything in float32, nothing rounded before the result."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.packed import Packed, widened


def supports(**_: object) -> bool:
    return True


def product(x_TK: jax.Array, weight: Packed, *, interpret: bool = False) -> jax.Array:
    wide_TK = x_TK.astype(jnp.float32)
    return jnp.matmul(wide_TK, widened(weight).T, precision=jax.lax.Precision.HIGHEST).astype(x_TK.dtype)
