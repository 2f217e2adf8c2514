"""The product with a packed weight on Hopper GPUs: one kernel for few rows, another for more."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.quantized_matmul import few, many
from pallas_kernels.quantized_matmul.packed import Packed

FEW_ROWS = 32
"""Up to them, the kernel for few rows computes the product.

µs of Llama-3.1-8B's products in int4 by 128 on an H100 that copies 2.74 TB/s, without launches; in brackets XLA's in bfloat16 (those of
queries, keys and values with more than 64 rows were not measured well). For few rows, the second pass over parts is included:

    rows   queries, keys, values   out           gate and up     down
       8   10.1 (20.3)              7.4 (14.6)    24.1 (81.8)    15.2 (43.8)
      32   11.0 (22.7)              8.5 (17.1)    28.1 (82.5)    16.9 (46.9)
      64   13.7 (24.6)             11.6 (18.6)    42.6 (82.9)    27.7 (51.8)
     128   18.1                    13.3 (20.2)    60.0 (88.0)    35.4 (52.3)
     256   21.9                    17.8 (24.8)    95.0 (99.5)    51.6 (55.6)
     512   37.9                    26.6 (40.6)   185.6 (168.5)   90.3 (77.1)
    1024   68.4                    43.3 (68.6)   318.5 (299.4)  144.4 (145.8)
"""


def supports(*, platform: str, dtype: DTypeLike, interpret: bool = False) -> bool:
    """Activations in bfloat16, which all numbers are decoded to."""
    return (platform == "gpu" or interpret) and _compat.has_mosaic() and jnp.dtype(dtype) == jnp.bfloat16


def product(x_TK: jax.Array, weight: Packed, *, dtype: DTypeLike | None = None, interpret: Any = False) -> jax.Array:
    num_rows = x_TK.shape[0]
    padded_TK = jnp.pad(x_TK, ((0, -num_rows % many.ALIGNMENT), (0, 0)))
    kernel = few if padded_TK.shape[0] <= FEW_ROWS else many
    return kernel.product(padded_TK, weight, dtype=dtype, interpret=interpret)[:num_rows]
