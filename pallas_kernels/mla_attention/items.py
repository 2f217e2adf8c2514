"""Tiles of the tokens of prompts, in the order in which kernels compute them."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tiles import COUNT, ROW, make_tiles

FIRST, TOKEN, NUM_TOKENS, CONTEXT, OWNER = range(5)  # columns of an item table


def make_items(
    query_start_R1: jax.Array, kv_length_R: jax.Array, num_tokens: int, tile_tokens: int, *, min_tokens: int, context: bool
) -> tuple[jax.Array, jax.Array]:
    """An item for each tile, int32[N, 5], and int32[1]: the number of those that have work. These come first, long ones before short.

    FIRST is the first token of the tile's row in this step, TOKEN and NUM_TOKENS are those of the tile, CONTEXT the number of the
    row's keys before FIRST, OWNER the row. Padding belongs to no row, sees no keys and makes items too, for its results are defined.
    context: the work is over keys before FIRST; tiles without any have none. Otherwise it is over the keys from FIRST on.
    """
    num_rows = kv_length_R.shape[0]
    new_R = query_start_R1[1:] - query_start_R1[:-1]
    tiles_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tile_tokens, min_tokens=min_tokens)
    _, token_N, count_N, _ = tiles_N4.T
    is_padding_N = tiles_N4[:, ROW] >= num_rows
    row_N = jnp.minimum(tiles_N4[:, ROW], num_rows - 1)
    # As if the keys of padding began behind it.
    first_N = jnp.where(is_padding_N, token_N + count_N, query_start_R1[row_N])
    context_N = jnp.where(is_padding_N, 0, kv_length_R[row_N] - new_R[row_N])
    keys_N = context_N if context else token_N + count_N - first_N + 1
    cost_N = jnp.where(tiles_N4[:, COUNT] > 0, keys_N, 0)
    index_N = jnp.arange(cost_N.shape[0])
    before_NN = (cost_N[None, :] > cost_N[:, None]) | (
        (cost_N[None, :] == cost_N[:, None]) & (index_N[None, :] < index_N[:, None])
    )
    items_N5 = jnp.stack([first_N, token_N, count_N, context_N, row_N], axis=1).astype(jnp.int32)
    rank_N = jnp.sum(before_NN, axis=1, dtype=jnp.int32)
    ordered_N5 = jnp.zeros_like(items_N5).at[rank_N].set(items_N5, unique_indices=True)
    return ordered_N5, jnp.sum(cost_N > 0, dtype=jnp.int32)[None]
