"""Latent attention in plain JAX whose cost follows the keys that there are: the path for CPUs.

Paged attention with one KV head, whose values are its keys: of the result, the first L columns. XLA gathers a chunk of pages once.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write import to_cache_type
from pallas_kernels.cache_write.bits import as_stored, value_type
from pallas_kernels.mla_attention.products import absorb, values_of
from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.paged_attention import xla
from pallas_kernels.rope_cache_write.xla import apply_rope, rms_norm


def supports(**_: object) -> bool:
    return True


def rope_and_write(
    q_TNH: jax.Array,
    vector_TC: jax.Array,
    cos_TE: jax.Array,
    sin_TE: jax.Array,
    norm_L: jax.Array,
    pages_P1SC: jax.Array,
    slot_T: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Tokens, jax.Array]:
    latent_dim, angles = len(norm_L), (cos_TE, sin_TE)
    plain_dim = q_TNH.shape[2] - (vector_TC.shape[1] - latent_dim)
    normed_TL = rms_norm(vector_TC[:, :latent_dim], norm_L, eps=eps)
    vector_TC = jnp.concatenate([normed_TL, apply_rope(vector_TC[:, latent_dim:], angles)], axis=-1)
    new_TC = to_cache_type(vector_TC, value_type(pages_P1SC.dtype), None)
    num_pages, _, page_size, _ = pages_P1SC.shape
    page_T = jnp.where(slot_T < 0, num_pages, slot_T // page_size)  # past the end: dropped
    stored_TC = as_stored(new_TC, pages_P1SC.dtype)
    pages_P1SC = pages_P1SC.at[page_T, 0, jnp.maximum(slot_T, 0) % page_size].set(stored_TC, mode="drop")
    read_TC = new_TC.astype(vector_TC.dtype)
    queries = q_TNH[..., :plain_dim], apply_rope(q_TNH[..., plain_dim:], angles)
    return Tokens(*queries, read_TC[:, :latent_dim], read_TC[:, latent_dim:]), pages_P1SC


def latent_attention(tokens: Tokens, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return attention_over_latents(xla, tokens, pages_P1SC, *rows, **options)


def latent_decode(q_RNL: jax.Array, q_RNE: jax.Array, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return decode_as_paged(xla, q_RNL, q_RNE, pages_P1SC, *rows, **options)


def attention_over_latents(
    module: ModuleType,
    tokens: Tokens,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    key_NPL: jax.Array,
    value_NVL: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """All by the absorbed form and an implementation of paged attention; new tokens are read from the cache."""
    q_TNC = jnp.concatenate([absorb(tokens.q_TNP, key_NPL), tokens.q_TNE], axis=-1)
    rows = (page_table_RB, query_start_R1, kv_length_R)
    out_TNC = module.paged_attention(q_TNC[:, None], pages_P1SC, pages_P1SC, *rows, scale=scale)[:, 0]
    return values_of(out_TNC[..., : key_NPL.shape[2]], value_NVL)


def decode_as_paged(
    module: ModuleType,
    q_RNL: jax.Array,
    q_RNE: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    num_queries: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """A decode by an implementation of paged attention."""
    q_RNC = jnp.concatenate([q_RNL, q_RNE], axis=-1)
    rows = (page_table_RB, kv_length_R)
    out_R1NC = module.paged_decode(q_RNC[:, None], pages_P1SC, pages_P1SC, *rows, scale=scale, num_queries=num_queries)
    return out_R1NC[:, 0, :, : q_RNL.shape[2]]
