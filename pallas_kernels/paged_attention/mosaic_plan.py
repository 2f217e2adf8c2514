"""The plan of a decode by Mosaic kernels: an even share of all tiles for each worker, cut into items (stream-K)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import cta_workers

PLACE, ROW, LENGTH, HEAD, TILE, COUNT = range(6)  # columns of Plan.work_W6


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the decode kernel: keys per tile, tiles in a worker's ring, CTAs per core, the least tiles that a worker is started for."""

    block_k: int = 64
    num_stages: int = 3
    ctas_per_core: int = 2
    min_share: int = 1
    workers_per_cta: int = 1


class Plan(NamedTuple):
    """The share of each worker. Equal for all layers, so that XLA computes it once per step."""

    rows_A2: jax.Array
    """int32[R + 1, 2]: row and length of the rows that have keys, one after the other; then zeros."""
    work_W6: jax.Array
    """int32[W, 6]: where each worker starts (index into rows_A2, row, its length, head, tile in this pair), its number of tiles."""
    workers_RK2: jax.Array
    """int32[R, K, 2]: first and last worker of a row and head; 0 and -1 if it has no keys."""


def make_plan(kv_length_R: jax.Array, num_kv_heads: int, tiles: DecodeTiles, window: int | None, num_workers: int) -> Plan:
    num_rows = kv_length_R.shape[0]
    first_R, end_R = tile_range(kv_length_R, tiles.block_k, window)
    tiles_R = end_R - first_R
    total_end_R = jnp.cumsum(tiles_R) * num_kv_heads
    total_start_R = total_end_R - tiles_R * num_kv_heads
    total = total_end_R[-1]
    used = jnp.clip(total // tiles.min_share, 1, num_workers)
    per_worker, extra = total // used, total % used  # the first `extra` workers have one more

    worker_W = jnp.arange(num_workers, dtype=jnp.int32)
    start_W = worker_W * per_worker + jnp.minimum(worker_W, extra)
    count_W = jnp.where(worker_W < used, per_worker + (worker_W < extra), 0)
    row_W = jnp.minimum(jnp.sum(total_end_R[None] <= start_W[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    offset_W = start_W - total_start_R[row_W]
    of_head_W = jnp.maximum(tiles_R[row_W], 1)
    active_R = (tiles_R > 0).astype(jnp.int32)
    place_R = jnp.cumsum(active_R) - active_R
    starts = (place_R[row_W], row_W, kv_length_R[row_W], offset_W // of_head_W, offset_W % of_head_W, count_W)
    work_W6 = jnp.stack(starts, axis=1)

    place_A = jnp.arange(num_rows + 1, dtype=jnp.int32)
    here_AR = (place_R[None] == place_A[:, None]) & (active_R[None] > 0)
    row_R = jnp.arange(num_rows, dtype=jnp.int32)
    rows_A2 = jnp.stack([jnp.where(here_AR, x_R[None], 0).sum(axis=1) for x_R in (row_R, kv_length_R)], axis=1)

    def worker_of(tile: jax.Array) -> jax.Array:
        in_longer = extra * (per_worker + 1)
        later = extra + (tile - in_longer) // jnp.maximum(per_worker, 1)
        return jnp.where(tile < in_longer, tile // (per_worker + 1), later)

    start_RK = total_start_R[:, None] + tiles_R[:, None] * jnp.arange(num_kv_heads, dtype=jnp.int32)[None]
    last_RK = start_RK + tiles_R[:, None] - 1
    workers_RK2 = jnp.stack([worker_of(start_RK), worker_of(last_RK)], axis=2)
    workers_RK2 = jnp.where((tiles_R > 0)[:, None, None], workers_RK2, jnp.array([0, -1], jnp.int32))
    return Plan(rows_A2.astype(jnp.int32), work_W6.astype(jnp.int32), workers_RK2.astype(jnp.int32))


def tile_range(length: jax.Array, block_k: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """The tiles that a query at the last position sees: first, and one past the last."""
    first = jnp.zeros_like(length) if window is None else lax.div(jnp.maximum(length - window, 0), jnp.int32(block_k))
    return first, lax.div(length + (block_k - 1), jnp.int32(block_k))


class Item(NamedTuple):
    """A run of tiles of one row and head."""

    row: jax.Array
    head: jax.Array
    length: jax.Array
    tile: jax.Array
    """The first one, in the row."""
    num_tiles: jax.Array
    is_first: jax.Array
    """Whether it begins with the first visible tile, and below whether it ends with the last."""
    is_last: jax.Array


def walk(
    visit: Callable[[Item, Any], Any],
    carry: Any,
    rows_ref,
    work_ref,
    *,
    num_kv_heads,
    block_k,
    window,
    find_worker: Callable[[], jax.Array] = cta_workers.find,
) -> Any:
    """The items of a worker, in order."""
    worker = find_worker()
    place, row, length, head, tile, left = (work_ref[worker, column] for column in (PLACE, ROW, LENGTH, HEAD, TILE, COUNT))

    def body(state):
        place, row, length, head, tile, left, carry = state
        # Loaded long before it is needed.
        next_row, next_length = rows_ref[place + 1, 0], rows_ref[place + 1, 1]
        first, end = tile_range(length, block_k, window)
        count = jnp.minimum(left, end - first - tile)
        item = Item(row, head, length, first + tile, count, tile == 0, first + tile + count == end)
        carry = visit(item, carry)
        is_row_done = head == num_kv_heads - 1
        return (
            jnp.where(is_row_done, place + 1, place),
            jnp.where(is_row_done, next_row, row),
            jnp.where(is_row_done, next_length, length),
            jnp.where(is_row_done, 0, head + 1),
            jnp.int32(0),
            left - count,
            carry,
        )

    state = (place, row, length, head, tile, left, carry)
    return lax.while_loop(lambda state: state[5] > 0, body, state)[-1]
