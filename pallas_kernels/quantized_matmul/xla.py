"""The product in plain JAX, with the weight widened to the type of the activations."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.packed import Packed, widened


def supports(**_: object) -> bool:
    return True


def product(x_TK: jax.Array, weight: Packed, *, dtype: DTypeLike | None = None, interpret: bool = False) -> jax.Array:
    weight_NK = widened(weight).astype(x_TK.dtype)
    sums_TN = lax.dot_general(x_TK, weight_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return sums_TN.astype(dtype or x_TK.dtype)
