"""Attention within chunks of the positions of a sequence: rows of a step that begin where a chunk does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Rows as `pallas_kernels.paged_attention` takes them."""

    page_table_RB: jax.Array
    query_start_R1: jax.Array
    kv_length_R: jax.Array
    num_queries: int | None
    """Tokens of each row, where all have as many; None: any mix."""


def in_chunks(rows: Rows, num_tokens: int, *, chunk: int, page_size: int) -> Rows:
    """Rows of one chunk each, with the pages of that chunk: as many of a row as its tokens may be in.

    num_tokens: of the step. chunk: in tokens, a multiple of page_size.
    """
    table_RB = rows.page_table_RB
    if rows.num_queries == 1:  # each row's last chunk
        first_R = jnp.maximum(rows.kv_length_R - 1, 0) // chunk
        kv_length_R = rows.kv_length_R - first_R * chunk
        return Rows(_pages(table_RB, first_R, chunk // page_size), rows.query_start_R1, kv_length_R, 1)
    most = num_tokens if rows.num_queries is None else rows.num_queries
    num_pieces = 1 + -(-(most - 1) // chunk)
    end_R1, count_R1 = rows.kv_length_R[:, None], jnp.diff(rows.query_start_R1)[:, None]
    start_R1 = jnp.maximum(end_R1 - count_R1, 0)
    chunk_RP = start_R1 // chunk + jnp.arange(num_pieces, dtype=jnp.int32)
    low_RP, high_RP = (jnp.clip(edge * chunk, start_R1, end_R1) for edge in (chunk_RP, chunk_RP + 1))
    kv_length_RP = jnp.where(high_RP > low_RP, high_RP - chunk_RP * chunk, 0)
    begin_RP = rows.query_start_R1[:-1, None] + low_RP - start_R1
    query_start = jnp.append(begin_RP.ravel(), rows.query_start_R1[-1])
    table = _pages(jnp.repeat(table_RB, num_pieces, axis=0), chunk_RP.ravel(), chunk // page_size)
    return Rows(table, query_start, kv_length_RP.ravel(), None)


def _pages(table_RB: jax.Array, chunk_R: jax.Array, num_pages: int) -> jax.Array:
    """The pages of a chunk of each row; of what is behind its table, any."""
    width = min(num_pages, table_RB.shape[1])
    place_RB = chunk_R[:, None] * num_pages + jnp.arange(width, dtype=jnp.int32)
    return jnp.take_along_axis(table_RB, jnp.minimum(place_RB, table_RB.shape[1] - 1), axis=1)
