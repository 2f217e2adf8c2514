"""Cuts the tokens of a ragged batch into tiles that belong to one row each, on the device and with a static bound."""

import jax
import jax.numpy as jnp

ROW, TOKEN, COUNT, POSITION = range(4)  # columns of a tile table


def max_tiles(num_tokens: int, num_rows: int, tile_tokens: int, *, align: int = 1) -> int:
    """The most tiles that num_tokens tokens can make: each row, and the padding, has at most one partly filled tile.

    With `align` a row's first tile has room for up to align - 1 tokens less.
    """
    rows = num_rows + 1
    return min(num_tokens, (num_tokens + rows * (tile_tokens - 1 + align - 1)) // tile_tokens)


def make_tiles(
    query_start_R1: jax.Array, kv_length_R: jax.Array, num_tokens: int, tile_tokens: int, *, min_tokens: int = 1, align: int = 1
) -> jax.Array:
    """The tile table int32[max_tiles, 4]: row, first token, number of tokens, position of the first token in its sequence.

    A tile's queries see the key positions below `position + count` at most. Tokens after the last row (padding) make tiles of a
    row of their own, of no keys: row R, and positions below zero. Tiles past the last one have count 0.
    Requests of fewer than min_tokens tokens make none.
    align, a divisor of tile_tokens: a tile ends where the next multiple of align at or below its first token is tile_tokens away,
    so that all tiles of a row but the first begin at a multiple of it.
    The same arguments give the same HLO, so XLA computes the table once for all layers of a model.
    """
    num_rows = kv_length_R.shape[0]
    start = query_start_R1
    end = jnp.concatenate([query_start_R1[1:], jnp.full((1,), num_tokens, jnp.int32)])
    kv_length = jnp.concatenate([kv_length_R, jnp.zeros((1,), jnp.int32)])
    is_request = jnp.arange(num_rows + 1) < num_rows
    is_cut = (end > start) & ~(is_request & (end - start < min_tokens))
    origin = start // align * align
    tiles_of_row = jnp.where(is_cut, (end - origin + (tile_tokens - 1)) // tile_tokens, 0)
    tile_end = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(max_tiles(num_tokens, num_rows, tile_tokens, align=align), dtype=jnp.int32)
    row = jnp.sum(tile_end[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    used = row <= num_rows
    row = jnp.minimum(row, num_rows)
    first = origin[row] + (tile - (tile_end - tiles_of_row)[row]) * tile_tokens
    token = jnp.where(used, jnp.maximum(first, start[row]), 0)
    count = jnp.where(used, jnp.minimum(end[row], first + tile_tokens) - token, 0)
    position = token - end[row] + kv_length[row]
    return jnp.stack([row, token, count, position], axis=1).astype(jnp.int32)
