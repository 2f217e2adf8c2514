"""The product with a packed weight on Hopper GPUs: one kernel for few rows, another for more."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.quantized_matmul import few, many
from pallas_kernels.quantized_matmul.packed import Packed

FEW_ROWS, MAX_FEW_ROWS = 16, 64
"""Up to the second, the kernel for few rows computes what would leave cores idle in the other one: of Llama-3.1-8B with 64 rows all but
gate and up (H200: 14.9 in place of 21.5 µs for queries, keys and values; gate and up 50.6 in place of 42.8)."""


def supports(*, platform: str, dtype: DTypeLike, interpret: bool = False) -> bool:
    """Activations in bfloat16, which all numbers are decoded to."""
    return (platform == "gpu" or interpret) and _compat.has_mosaic() and jnp.dtype(dtype) == jnp.bfloat16


def takes_few(num_rows: int, weight: Packed) -> bool:
    """Whether the kernel for few rows computes the product."""
    num_items = many.num_items(num_rows, weight.words.shape[0], many.MAX_TILE_ROWS)
    return num_rows <= FEW_ROWS or (num_rows <= MAX_FEW_ROWS and num_items < _compat.num_cores())


def product(x_TK: jax.Array, weight: Packed, *, interpret: Any = False) -> jax.Array:
    num_rows = x_TK.shape[0]
    padded_TK = jnp.pad(x_TK, ((0, -num_rows % many.ALIGNMENT), (0, 0)))
    if takes_few(padded_TK.shape[0], weight):
        return few.product(padded_TK, weight, interpret=interpret)[:num_rows].astype(x_TK.dtype)
    return many.product(padded_TK, weight, interpret=interpret)[:num_rows]
