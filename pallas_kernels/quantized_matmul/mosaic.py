"""The product with a packed weight on Hopper GPUs: one kernel for few rows, another for more."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.quantized_matmul import few, many
from pallas_kernels.quantized_matmul.packed import Packed

FEW_ROWS = 16
"""Up to them, the kernel for few rows computes the product."""


def supports(*, platform: str, dtype: DTypeLike, interpret: bool = False) -> bool:
    """Activations in bfloat16, which all numbers are decoded to."""
    return (platform == "gpu" or interpret) and _compat.has_mosaic() and jnp.dtype(dtype) == jnp.bfloat16


def product(x_TK: jax.Array, weight: Packed, *, interpret: Any = False) -> jax.Array:
    num_rows = x_TK.shape[0]
    padded_TK = jnp.pad(x_TK, ((0, -num_rows % many.ALIGNMENT), (0, 0)))
    kernel = few if padded_TK.shape[0] <= FEW_ROWS else many
    return kernel.product(padded_TK, weight, interpret=interpret)[:num_rows]
