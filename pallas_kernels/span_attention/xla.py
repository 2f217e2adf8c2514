"""Span attention in plain JAX: tiles of queries over the keys that any of their tokens may see.

    tokens     | tile 0 | tile 1 | tile 2 | ...
    tile 0     [ M      | most   ]                 scores [M, M + most], whatever the spans are
    tile 1              [ M      | most   ]

All sizes are static, so that a GPU runs it without waiting for the host.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.parts import NO_KEYS

TILE_TOKENS, KEYS_MULTIPLE = 128, 16
SCORE_BYTES = 64 << 20
"""Of the tiles that are computed at a time."""
MASKED = -1e30  # finite, so that a token that sees nothing gives no NaN


def span_attention(
    q_TKGH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    num_later_T: jax.Array,
    most: int,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, num_kv_heads, num_groups, _ = q_TKGH.shape
    precision = lax.Precision.HIGHEST if q_TKGH.dtype == jnp.float32 else None
    tile = min(TILE_TOKENS, num_tokens)
    num_tiles = -(-num_tokens // tile)
    num_keys = tile + _padded(most)
    padding = num_tiles * tile - num_tokens
    # Tokens of several requests are in a tile: a weight of zero must not make NaN of another's value.
    v_TKH = jnp.where(jnp.isfinite(v_TKH), v_TKH, 0)
    k_TKH, v_TKH = (jnp.pad(x, ((0, padding + num_keys - tile), (0, 0), (0, 0))) for x in (k_TKH, v_TKH))
    q_NMKGH = jnp.pad(q_TKGH, ((0, padding), (0, 0), (0, 0), (0, 0))).reshape(num_tiles, tile, *q_TKGH.shape[1:])
    num_later_NM = jnp.pad(num_later_T, (0, padding)).reshape(num_tiles, tile)
    distance_MW = jnp.arange(num_keys, dtype=jnp.int32) - jnp.arange(tile, dtype=jnp.int32)[:, None]

    def attend(tile_inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, q_MKGH, num_later_M = tile_inputs
        k_WKH, v_WKH = (lax.dynamic_slice_in_dim(x, first, num_keys) for x in (k_TKH, v_TKH))
        scores_KGMW = scale * jnp.einsum(
            "mkgh,wkh->kgmw", q_MKGH, k_WKH, precision=precision, preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            scores_KGMW = soft_cap * jnp.tanh(scores_KGMW / soft_cap)
        visible_MW = (distance_MW > 0) & (distance_MW <= num_later_M[:, None])
        scores_KGMW = jnp.where(visible_MW, scores_KGMW, MASKED)
        top_KGM = scores_KGMW.max(axis=-1)
        weights_KGMW = jnp.where(visible_MW, jnp.exp(scores_KGMW - top_KGM[..., None]), 0)
        sum_KGM = weights_KGMW.sum(axis=-1)
        total_MKGH = jnp.einsum(
            "kgmw,wkh->mkgh", weights_KGMW.astype(v_WKH.dtype), v_WKH, precision=precision, preferred_element_type=jnp.float32
        )
        sum_MKG, top_MKG = (jnp.moveaxis(x, 2, 0) for x in (sum_KGM, top_KGM))
        sees_M11 = (num_later_M > 0)[:, None, None]
        lse_MKG = jnp.where(sees_M11, top_MKG + jnp.log(jnp.where(sees_M11, sum_MKG, 1)), NO_KEYS)
        return (total_MKGH / jnp.where(sees_M11, sum_MKG, 1)[..., None]).astype(q_MKGH.dtype), lse_MKG

    first_N = tile * jnp.arange(num_tiles, dtype=jnp.int32)
    at_a_time = max(1, SCORE_BYTES // (4 * num_kv_heads * num_groups * tile * num_keys))
    out, lse = lax.map(attend, (first_N, q_NMKGH, num_later_NM), batch_size=at_a_time)
    return out.reshape(-1, *q_TKGH.shape[1:])[:num_tokens], lse.reshape(-1, num_kv_heads, num_groups)[:num_tokens]


def score_bytes(num_tokens: int, num_heads: int, most: int) -> int:
    """Bytes of the scores that exist at a time."""
    tile = min(TILE_TOKENS, num_tokens)
    of_tile = 4 * num_heads * tile * (tile + _padded(most))
    return max(of_tile, min(SCORE_BYTES, -(-num_tokens // tile) * of_tile))


def _padded(most: int) -> int:
    """Keys behind a tile."""
    return -(-most // KEYS_MULTIPLE) * KEYS_MULTIPLE
