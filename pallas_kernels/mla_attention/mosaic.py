"""Latent attention on Hopper GPUs: decodes by a Mosaic kernel, the rest by those of Triton."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import has_mosaic
from pallas_kernels.mla_attention import triton
from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.mla_attention.triton_write import rope_and_write

__all__ = ["latent_attention", "latent_decode", "rope_and_write", "supports"]


def latent_attention(tokens: Tokens, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return triton.ragged(latent_decode, tokens, pages_P1SC, *rows, **options)


def latent_decode(q_RNL: jax.Array, q_RNE: jax.Array, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    # Imported late: it needs Mosaic, and `supports` has to answer where there is none.
    from pallas_kernels.mla_attention import mosaic_decode

    return mosaic_decode.latent_decode(q_RNL, q_RNE, pages_P1SC, *rows, **options)


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    num_heads: int,
    latent_dim: int,
    rotated_dim: int,
    plain_dim: int,
    value_dim: int,
    page_size: int,
    interpret: bool = False,
) -> bool:
    """Widths of whole tiles, and a cache of the queries' type; heads: two tiles of keys must have room beside them."""
    if (platform != "gpu" and not interpret) or not has_mosaic():
        return False
    from pallas_kernels.mla_attention.mosaic_decode import PAGE_SIZES, num_stages

    if not triton.supports(
        platform=platform,
        dtype=dtype,
        cache_dtype=cache_dtype,
        latent_dim=latent_dim,
        rotated_dim=rotated_dim,
        plain_dim=plain_dim,
        value_dim=value_dim,
        interpret=interpret,
    ):
        return False
    is_tiled = latent_dim % 64 == 0 and rotated_dim % 64 == 0 and 64 <= latent_dim <= 512 and 64 <= rotated_dim <= 128
    has_type = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and jnp.dtype(cache_dtype) == jnp.dtype(dtype)
    has_room = num_stages(num_heads, latent_dim + rotated_dim, latent_dim) >= 2
    return is_tiled and has_type and page_size in PAGE_SIZES and has_room
