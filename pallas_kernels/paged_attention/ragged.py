"""A ragged batch by two kernels: one that splits a row's keys, for single tokens, and one that holds a tile of tokens, for all else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def by_row_length(
    decode: Callable[..., Any],
    prefill: Callable[..., Any],
    q_TKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
) -> Any:
    """Rows of one token, which would each fill a whole tile, go through `decode`, longer ones through `prefill`.

    Both take the arrays of the dispatcher's functions, and give arrays by token; `prefill` takes min_tokens too, and leaves shorter
    rows undefined.
    """
    num_tokens = q_TKGH.shape[0]
    start_R = query_start_R1[:-1]
    is_single_R = query_start_R1[1:] - start_R == 1
    singles = decode(
        q_TKGH.at[start_R].get(mode="clip"),
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        jnp.where(is_single_R, kv_length_R, 0),
    )
    outs = prefill(q_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, query_start_R1, kv_length_R, min_tokens=2)

    def placed(out: jax.Array, single: jax.Array) -> jax.Array:
        return out.at[jnp.where(is_single_R, start_R, num_tokens)].set(single, mode="drop")

    return jax.tree.map(placed, outs, singles)
