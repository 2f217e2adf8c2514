"""Latent attention by Pallas-Triton, for a decode and for a ragged batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import triton_converts_fp8
from pallas_kernels.mla_attention import triton_prefill
from pallas_kernels.mla_attention.triton_decode import latent_decode
from pallas_kernels.sizes import next_power_of_two

__all__ = ["latent_attention", "latent_decode", "supports"]


def latent_attention(
    q_TNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    value_dim: int,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """Rows of one token, which would each fill a whole tile, by the decode kernel, longer ones by that for prompts."""
    options: dict[str, Any] = {"value_dim": value_dim, "scale": scale, "interpret": interpret}
    num_tokens, start_R = q_TNC.shape[0], query_start_R1[:-1]
    is_single_R = query_start_R1[1:] - start_R == 1
    q_RNC, length_R = q_TNC.at[start_R].get(mode="clip"), jnp.where(is_single_R, kv_length_R, 0)
    single_RNV = latent_decode(q_RNC, pages_P1SC, page_table_RB, length_R, **options)
    rows = (page_table_RB, query_start_R1, kv_length_R)
    out_TNV = triton_prefill.latent_attention(q_TNC, pages_P1SC, *rows, **options, min_tokens=2)
    return out_TNV.at[jnp.where(is_single_R, start_R, num_tokens)].set(single_RNV, mode="drop")


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    width: int,
    value_dim: int,
    interpret: bool = False,
) -> bool:
    """Widths: what shared memory holds, and parts for which there are products of tiles."""
    if platform != "gpu" and not interpret:
        return False
    wide = (jnp.float32, jnp.bfloat16, jnp.float16)
    cache_fits = jnp.dtype(cache_dtype) in wide or (jnp.dtype(cache_dtype) == jnp.float8_e4m3fn and triton_converts_fp8())
    fits = value_dim >= 16 and width - value_dim >= 16 and next_power_of_two(value_dim) <= 512 and width - value_dim <= 64
    return jnp.dtype(dtype) in wide and cache_fits and (fits or interpret)
