"""Latent attention on Hopper GPUs: decodes by a Mosaic kernel, prompts by that of Triton."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import has_mosaic
from pallas_kernels.mla_attention import triton


def latent_attention(q_TNC: jax.Array, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return triton.ragged(latent_decode, q_TNC, pages_P1SC, *rows, **options)


def latent_decode(q_RNC: jax.Array, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    # Imported late: it needs Mosaic, and `supports` has to answer where there is none.
    from pallas_kernels.mla_attention import mosaic_decode

    return mosaic_decode.latent_decode(q_RNC, pages_P1SC, *rows, **options)


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    num_heads: int,
    width: int,
    value_dim: int,
    page_size: int,
    interpret: bool = False,
) -> bool:
    """Widths of whole tiles, and a cache of the queries' type; heads: two tiles of keys must have room beside them."""
    if (platform != "gpu" and not interpret) or not has_mosaic():
        return False
    from pallas_kernels.mla_attention.mosaic_decode import PAGE_SIZES, num_stages

    is_tiled = value_dim % 64 == 0 and width % 64 == 0 and 64 <= value_dim <= 512 and 64 <= width - value_dim <= 128
    has_type = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and jnp.dtype(cache_dtype) == jnp.dtype(dtype)
    return is_tiled and has_type and page_size in PAGE_SIZES and num_stages(num_heads, width, value_dim) >= 2
