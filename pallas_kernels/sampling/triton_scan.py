"""What the sampling kernels share: sizes, and the walk of one program over its share of a row's logits.

    row r    [tile 0][tile 1]...[tile n - 1]     a tile is `block` columns
             |- split 0 --|- split 1 --| ...     grid (R, splits); a later kernel combines the splits
    groups   [g g g g g ...                      of 16 neighbouring columns: the walk leaves the maximum of each

The maxima are a sixteenth of the row and bound it: k groups with a maximum ≥ t hold at least k logits ≥ t, and all logits
≥ t lie in groups with a maximum ≥ t. So a row is read once, and after that only the few groups that can matter.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import load, num_cores, store
from pallas_kernels.sampling import COUNT_BITS
from pallas_kernels.sizes import next_power_of_two

MAX_VOCAB_SIZE = 1 << 19
_MAX_GROUPS = 1 << 14  # held in registers by one program


@dataclass(frozen=True)
class ScanTiles:
    """Sizes of the walk."""

    block: int
    num_splits: int
    num_warps: int = 4


def pick_tiles(num_rows: int, vocab_size: int, block: int = 2048, num_warps: int = 4, waves: int = 12) -> ScanTiles:
    """Sizes for a shape: as many programs as `waves` per core, none without a tile of its own."""
    block = min(block, max(128, next_power_of_two(vocab_size)))
    wanted = max(1, waves * num_cores() // num_rows)
    return ScanTiles(block, min(ceil_div(vocab_size, block), wanted), num_warps)


def group_size(vocab_size: int) -> int:
    """Columns of a group."""
    return max(16, next_power_of_two(ceil_div(vocab_size, _MAX_GROUPS)))


def num_groups(vocab_size: int) -> int:
    return ceil_div(vocab_size, group_size(vocab_size))


def group_warps(vocab_size: int) -> int:
    """Warps of a program that holds the maxima of all groups: at most 32 of them in a lane's registers."""
    return 8 if num_groups(vocab_size) <= 8192 else 16


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tile_range(split: jax.Array, vocab_size: int, tiles: ScanTiles) -> tuple[jax.Array, jax.Array]:
    """First tile of a split and the one after its last; both may be past the row's end."""
    num_tiles = ceil_div(vocab_size, tiles.block)
    per_split = ceil_div(num_tiles, tiles.num_splits)
    begin = split * per_split
    return begin, jnp.minimum(begin + per_split, num_tiles)


class Logits:
    """Logits as a kernel reads them."""

    def __init__(self, ref: Any, adjustments: Any = None):
        """adjustments: `Adjustments` of references."""
        self._ref, self._adjustments = ref, adjustments
        self.vocab_size = ref.shape[1]

    def at(self, row: jax.Array, column: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Those of a row at the columns; -inf past its end and where the mask is not set."""
        mask = column < self.vocab_size if mask is None else mask & (column < self.vocab_size)
        x = load(self._ref.at[row, column], mask=mask, other=-jnp.inf)
        return x if self._adjustments is None else self._adjust(x, row, column, mask, self._adjustments)

    def _adjust(self, x: jax.Array, row: jax.Array, column: jax.Array, mask: jax.Array, by: Any) -> jax.Array:
        word_row = by.word_row[row]
        word = load(by.words_NV.at[jnp.maximum(word_row, 0), column], mask=mask & (word_row >= 0), other=0)
        count = word & ((1 << COUNT_BITS) - 1)
        repetition = by.repetition[row]
        is_there = (word & ((2 << COUNT_BITS) - 1)) != 0
        x = jnp.where(is_there, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - by.frequency[row] * count.astype(jnp.float32) - jnp.where(count > 0, by.presence[row], 0.0)
        allowed = load(by.mask_RW.at[row, lax.div(column, 32)], mask=mask, other=0) >> lax.rem(column, 32)
        return jnp.where((allowed & 1) != 0, x, -jnp.inf)


def nan_is_highest(x: jax.Array) -> jax.Array:
    return jnp.where(x != x, jnp.inf, x)


def finite_or_zero(x: jax.Array) -> jax.Array:
    """What to subtract before an exponential: -inf - -inf would be NaN."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)


def leave_group_maxima(logits: Logits, group_max_ref, row, split, scale, own, tiles: ScanTiles) -> tuple[jax.Array, ...]:
    """Walk a split and store the maxima of its groups of scaled logits.

    Returns the split's highest scaled logit, the sum of exponentials relative to it, and how many logits are ≥ own, float32.
    """
    vocab_size = logits.vocab_size
    size = group_size(vocab_size)
    groups_per_tile = tiles.block // size

    def body(tile, carry):
        highest, total, count = carry
        group_g = tile * groups_per_tile + jnp.arange(groups_per_tile)
        column_gs = group_g[:, None] * size + jnp.arange(size)[None, :]
        x_gs = logits.at(row, column_gs) * scale
        max_g = jnp.max(x_gs, axis=1)
        store(group_max_ref.at[row, group_g], max_g, mask=group_g < group_max_ref.shape[1])
        new_highest = jnp.maximum(highest, jnp.max(max_g, axis=0))
        shift = finite_or_zero(new_highest)
        added = jnp.sum(jnp.sum(jnp.exp(x_gs - shift), axis=1), axis=0)
        total = jnp.where(total > 0, total * jnp.exp(finite_or_zero(highest) - shift), 0.0) + added
        if own is not None:
            # Columns past the end are -inf, which an own logit of -inf would count.
            counts_gs = (x_gs >= own) & (column_gs < vocab_size)
            count += jnp.sum(jnp.sum(jnp.where(counts_gs, 1.0, 0.0), axis=1), axis=0)
        return new_highest, total, count

    begin, end = tile_range(split, vocab_size, tiles)
    return lax.fori_loop(begin, end, body, (jnp.float32(-jnp.inf), jnp.float32(0), jnp.float32(0)))


def combine_totals(highest_s: jax.Array, total_s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Highest value of a row and its sum of exponentials relative to `finite_or_zero` of it, from those of its splits."""
    highest = jnp.max(highest_s, axis=0)
    weight_s = jnp.exp(finite_or_zero(highest_s) - finite_or_zero(highest))
    return highest, jnp.sum(jnp.where(total_s > 0, total_s * weight_s, 0.0), axis=0)
