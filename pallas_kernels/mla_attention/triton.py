"""Latent attention by Pallas-Triton.

A decode is computed over latents. In a ragged batch rows of one token are decodes too; longer ones attend to their own tokens, whose
keys and values are expanded for that, and to their context in the cache over latents.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import triton_converts_fp8
from pallas_kernels.mla_attention.products import absorb, expand, values_of
from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.mla_attention.triton_context import add_context
from pallas_kernels.mla_attention.triton_decode import latent_decode
from pallas_kernels.mla_attention.triton_local import LocalTiles, attend_to_own
from pallas_kernels.mla_attention.triton_write import rope_and_write

__all__ = ["latent_attention", "latent_decode", "ragged", "rope_and_write", "supports"]


def latent_attention(tokens: Tokens, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return ragged(latent_decode, tokens, pages_P1SC, *rows, **options)


def ragged(
    decode: Callable[..., jax.Array],
    tokens: Tokens,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    key_NPL: jax.Array,
    value_NVL: jax.Array,
    *,
    local_tiles: LocalTiles | None = None,
    **options: Any,
) -> jax.Array:
    """Rows of one token by `decode`, longer ones in two parts."""
    num_tokens = len(tokens.q_TNP)
    start_R = query_start_R1[:-1]
    is_single_R = query_start_R1[1:] - start_R == 1
    q_RNP, q_RNE = (q.at[start_R].get(mode="clip") for q in tokens[:2])
    single_length_R = jnp.where(is_single_R, kv_length_R, 0)
    sum_RNL = decode(absorb(q_RNP, key_NPL), q_RNE, pages_P1SC, page_table_RB, single_length_R, **options)
    single_RNV = values_of(sum_RNL, value_NVL)

    q_TNP, q_TNE, latent_TL, rotated_TE = tokens
    keys, value_TNV = (expand(latent_TL, key_NPL), rotated_TE), expand(latent_TL, value_NVL)
    rows = (query_start_R1, kv_length_R)
    out_TNV, lse_TN = attend_to_own(q_TNP, q_TNE, *keys, value_TNV, *rows, min_tokens=2, tiles=local_tiles, **options)
    cache = (pages_P1SC, page_table_RB)
    out_TNV = add_context(out_TNV, lse_TN, q_TNP, q_TNE, *cache, *rows, key_NPL, value_NVL, min_tokens=2, **options)
    return out_TNV.at[jnp.where(is_single_R, start_R, num_tokens)].set(single_RNV, mode="drop")


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    latent_dim: int,
    rotated_dim: int,
    plain_dim: int,
    value_dim: int,
    interpret: bool = False,
    **_: object,
) -> bool:
    """Widths: what shared memory holds, and parts for which there are products of tiles."""
    if platform != "gpu" and not interpret:
        return False
    wide = (jnp.float32, jnp.bfloat16, jnp.float16)
    cache_fits = jnp.dtype(cache_dtype) in wide or (jnp.dtype(cache_dtype) == jnp.float8_e4m3fn and triton_converts_fp8())
    sizes = ((latent_dim, 512), (rotated_dim, 64), (plain_dim, 128), (value_dim, 128))
    fits = all(16 <= size <= most for size, most in sizes)
    return jnp.dtype(dtype) in wide and cache_fits and (fits or interpret)
