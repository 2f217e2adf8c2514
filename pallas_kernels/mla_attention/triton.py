"""Latent attention by Pallas-Triton, for a decode and for a ragged batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import triton_converts_fp8
from pallas_kernels.mla_attention import triton_prefill
from pallas_kernels.mla_attention.triton_decode import latent_decode
from pallas_kernels.paged_attention.ragged import by_row_length

__all__ = ["latent_attention", "latent_decode", "ragged", "supports"]


def latent_attention(
    q_TNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    **options: Any,
) -> jax.Array:
    return ragged(latent_decode, q_TNC, pages_P1SC, page_table_RB, query_start_R1, kv_length_R, **options)


def ragged(
    decode: Callable[..., jax.Array], q_TNC: jax.Array, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any
) -> jax.Array:
    """Rows of one token by `decode`, longer ones by the kernel for prompts."""

    def without_values(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda q, pages, _, *rest, **more: function(q, pages, *rest, **options, **more)

    prefill = without_values(triton_prefill.latent_attention)
    return by_row_length(without_values(decode), prefill, q_TNC, pages_P1SC, pages_P1SC, *rows)


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    width: int,
    value_dim: int,
    interpret: bool = False,
    **_: object,
) -> bool:
    """Widths: what shared memory holds, and parts for which there are products of tiles."""
    if platform != "gpu" and not interpret:
        return False
    wide = (jnp.float32, jnp.bfloat16, jnp.float16)
    cache_fits = jnp.dtype(cache_dtype) in wide or (jnp.dtype(cache_dtype) == jnp.float8_e4m3fn and triton_converts_fp8())
    fits = 16 <= value_dim <= 512 and 16 <= width - value_dim <= 64
    return jnp.dtype(dtype) in wide and cache_fits and (fits or interpret)
