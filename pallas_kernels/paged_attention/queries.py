"""Decodes of a few queries a row: query w of W of a row stands at position kv_length - W + w and sees the keys up to its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def check_rows(num_tokens: int, num_rows: int, num_queries: int) -> None:
    """Raises ValueError if the queries are not num_queries for each row."""
    if num_queries < 1 or num_tokens != num_rows * num_queries:
        raise ValueError(
            f"a decode of num_queries {num_queries} over a page table of {num_rows} rows takes {num_rows} x {num_queries} queries, "
            f"row by row, and got {num_tokens}; give as many, and at least one a row"
        )


def in_parts(
    decode: Callable[..., jax.Array],
    most: int,
    queries: tuple[jax.Array, ...],
    pages: tuple[jax.Array, ...],
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    num_queries: int,
    **options: Any,
) -> jax.Array:
    """`decode` where it takes at most `most` queries a row: each row as several, which read the same pages.

    queries: arrays [R * W, ...]. Parts are of one size, and what the first one lacks stands before the row's queries.
    """
    num_parts = -(-num_queries // most)
    size = -(-num_queries // num_parts)
    padding = num_parts * size - num_queries
    num_rows = len(kv_length_R)

    def cut(q: jax.Array) -> jax.Array:
        q = q.reshape(num_rows, num_queries, *q.shape[1:])
        return jnp.pad(q, ((0, 0), (padding, 0), *((0, 0),) * (q.ndim - 2))).reshape(-1, *q.shape[2:])

    behind_C = (num_parts - 1 - jnp.arange(num_parts, dtype=jnp.int32)) * size
    # Without keys in a padding row too.
    length_RC = jnp.maximum(kv_length_R[:, None] - behind_C, 0)
    several = {"num_queries": size} if size > 1 else {}
    rows = (jnp.repeat(page_table_RB, num_parts, axis=0), length_RC.reshape(-1))
    out = decode(*map(cut, queries), *pages, *rows, **several, **options)
    return out.reshape(num_rows, -1, *out.shape[1:])[:, padding:].reshape(-1, *out.shape[1:])
