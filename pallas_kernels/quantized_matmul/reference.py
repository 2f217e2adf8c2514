"""The plain truth: everything in float32, nothing rounded before the result."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.packed import Packed, widened


def supports(**_: object) -> bool:
    return True


def product(x_TK: jax.Array, weight: Packed, *, dtype: DTypeLike | None = None, interpret: bool = False) -> jax.Array:
    sums_TN = jnp.matmul(x_TK.astype(jnp.float32), widened(weight).T, precision=jax.lax.Precision.HIGHEST)
    return sums_TN.astype(dtype or x_TK.dtype)
