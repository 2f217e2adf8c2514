"""The tokens that score highest for each query.

Tiles of queries of a row, a few at a time, walk the keys of their rows in chunks and keep the best so far. Their number and that of the
chunks are values on the device, so that the cost follows the keys that there are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_write.bits import as_stored, as_values, value_type
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles

TILE_TOKENS = 16
"""Queries of a row that share a copy of its keys."""
QUERIES, CHUNK = 64, 2048
"""Queries at a time, and keys of each."""
WORK_BYTES = 128 << 20
"""Scores of 64 heads, keys and the best so far of so many, float32."""


def write_keys(pages_P1SI: jax.Array, key_TI: jax.Array, slot_T: jax.Array) -> jax.Array:
    """The pool with the keys of tokens in their slots, int32: page * S + offset; a negative one is written nowhere (padding)."""
    num_pages, _, page_size, _ = pages_P1SI.shape
    page_T = jnp.where(slot_T < 0, num_pages, slot_T // page_size)  # past the end: dropped
    stored_TI = as_stored(key_TI.astype(value_type(pages_P1SI.dtype)), pages_P1SI.dtype)
    return pages_P1SI.at[page_T, 0, jnp.maximum(slot_T, 0) % page_size].set(stored_TI, mode="drop")


def choose_tokens(
    q_TXI: jax.Array,
    weight_TX: jax.Array,
    pages_P1SI: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    top_k: int,
    num_queries: int | None = None,
    chunk: int = CHUNK,
) -> jax.Array:
    """-> slot_TK, in no order, of tokens whose keys are in the cache, the queries' own included.

    num_queries: tokens of each row, if all have as many; None: any mix. chunk: keys that are scored at a time.
    """
    num_tokens = len(q_TXI)
    num_rows, num_pages = page_table_RB.shape
    page_size = pages_P1SI.shape[2]
    tile = min(TILE_TOKENS if num_queries is None else num_queries, num_tokens)
    group = max(1, QUERIES // tile)
    chunk_pages = min(max(1, chunk // page_size), num_pages)
    chunk = chunk_pages * page_size
    tiles_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tile)
    group = min(group, len(tiles_N4))
    tiles_N4 = jnp.pad(tiles_N4, ((0, -len(tiles_N4) % group), (0, 0)))
    is_used_N = (tiles_N4[:, COUNT] > 0) & (tiles_N4[:, ROW] < num_rows)
    table_RB = jnp.pad(page_table_RB, ((0, 0), (0, -num_pages % chunk_pages)))
    offset_W = jnp.arange(tile, dtype=jnp.int32)
    first_K = jnp.arange(top_k, dtype=jnp.int32)

    def of_group(index: jax.Array, slot_TK: jax.Array) -> jax.Array:
        tiles_n4 = lax.dynamic_slice_in_dim(tiles_N4, index * group, group)
        row_n, token_n, count_n, position_n = (tiles_n4[:, column] for column in (ROW, TOKEN, COUNT, POSITION))
        is_used_n = lax.dynamic_slice_in_dim(is_used_N, index * group, group)
        is_query_nW = is_used_n[:, None] & (offset_W < count_n[:, None])
        token_nW = jnp.where(is_query_nW, token_n[:, None] + offset_W, num_tokens)
        position_nW = jnp.where(is_query_nW, position_n[:, None] + offset_W, -1)
        q_nWXI, weight_nWX = (x.at[token_nW].get(mode="clip") for x in (q_TXI, weight_TX))
        table_nB = table_RB.at[row_n].get(mode="clip")
        longest = jnp.max(position_nW) + 1
        has_choice = longest > top_k

        def with_chunk(number: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            best_nWK, at_nWK = best
            pages_nc = lax.dynamic_slice_in_dim(table_nB, number * chunk_pages, chunk_pages, axis=1)
            key_nCI = as_values(pages_P1SI.at[pages_nc, 0].get(mode="clip")).reshape(group, chunk, -1)
            position_C = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
            score_nWC = scores(q_nWXI, weight_nWX, key_nCI)
            score_nWC = jnp.where(position_C <= position_nW[..., None], score_nWC, -jnp.inf)
            at_nWC = jnp.broadcast_to(position_C, score_nWC.shape)
            # Of equal scores the first is taken: those so far are of earlier tokens, and in this order among themselves.
            best_nWK, which_nWK = lax.top_k(jnp.concatenate([best_nWK, score_nWC], axis=-1), top_k)
            return best_nWK, jnp.take_along_axis(jnp.concatenate([at_nWK, at_nWC], axis=-1), which_nWK, axis=-1)

        shape = (group, tile, top_k)
        empty = jnp.broadcast_to(jnp.where(has_choice, -jnp.inf, jnp.float32(0)), shape), jnp.broadcast_to(first_K, shape)
        num_chunks = jnp.where(has_choice, (longest + chunk - 1) // chunk, 0)
        best_nWK, at_nWK = lax.fori_loop(0, num_chunks, with_chunk, empty)
        is_chosen_nWK = (best_nWK > -jnp.inf) & (at_nWK <= position_nW[..., None])
        at_nM = jnp.minimum(at_nWK, num_pages * page_size - 1).reshape(group, -1)  # further ones are not chosen
        page_nM = jnp.take_along_axis(table_nB, at_nM // page_size, axis=1)
        slot_nWK = (page_nM * page_size + at_nM % page_size).reshape(shape)
        return slot_TK.at[token_nW].set(jnp.where(is_chosen_nWK, slot_nWK, -1), mode="drop")

    num_groups = (jnp.sum(is_used_N) + group - 1) // group
    return lax.fori_loop(0, num_groups, of_group, jnp.full((num_tokens, top_k), -1, jnp.int32))


def scores(q_nWXI: jax.Array, weight_nWX: jax.Array, key_nCI: jax.Array) -> jax.Array:
    """Float32 [n, W, C]: of each query and key, the sum over heads of weight * relu(q . key)."""
    precision = lax.Precision.HIGHEST if q_nWXI.dtype == jnp.float32 else None
    key_nCI = key_nCI.astype(q_nWXI.dtype)
    products_nWXC = jnp.einsum("nwxi,nci->nwxc", q_nWXI, key_nCI, precision=precision, preferred_element_type=jnp.float32)
    score_nWC = jnp.sum(jax.nn.relu(products_nWXC) * weight_nWX.astype(jnp.float32)[..., None], axis=2)
    return jnp.where(score_nWC == 0, 0.0, score_nWC)  # -0.0, which sorting would put behind 0.0
