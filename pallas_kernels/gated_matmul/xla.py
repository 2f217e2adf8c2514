"""Gate, up and the activation in plain JAX: right by inspection."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.quantize.values import Quantized


def supports(
    *, platform: str, dtype: DTypeLike, width: int, hidden: int, is_scaled: bool = False, interpret: bool = False
) -> bool:
    return True


def product(x_TD: jax.Array, weight_D2F: jax.Array, *, activation: str, interpret: Any = False) -> jax.Array:
    """See the folder."""
    sums_T2F = jnp.einsum(
        "td,dcf->tcf", x_TD, weight_D2F, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return ACTIVATIONS[activation](sums_T2F[:, 0], sums_T2F[:, 1]).astype(x_TD.dtype)


def scaled_product(
    x: Quantized, values_2FD: jax.Array, scale_2F: jax.Array, *, activation: str, dtype: DTypeLike, interpret: Any = False
) -> jax.Array:
    """See the folder."""
    wide_TD, wide_2FD = x.values_TN.astype(jnp.float32), values_2FD.astype(jnp.float32)
    sums_T2F = jnp.einsum("td,cfd->tcf", wide_TD, wide_2FD, precision=jax.lax.Precision.HIGHEST)
    sums_T2F = sums_T2F * x.scale_T[:, None, None] * scale_2F
    return ACTIVATIONS[activation](sums_T2F[:, 0], sums_T2F[:, 1]).astype(dtype)
