"""The k largest logits of every row in order, its logsumexp and the rank of one token, for Pallas-Triton.

    scan     (R, splits)   the maxima of groups of columns, sums of exponentials, how many logits reach the token's
    extract  (R,)          k times: the group of the largest maximum, in it the largest logit, and its maximum without that one

A group is a run of columns, so the lowest id of equals lies in the first of the groups that share a maximum.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import sampling
from pallas_kernels._compat import load, triton_call
from pallas_kernels.sampling import triton_scan as scan
from pallas_kernels.sizes import next_power_of_two


@dataclass(frozen=True)
class TopTiles:
    """Sizes of the two kernels."""

    scan: scan.ScanTiles
    extract_warps: int = 8


def top_values(
    logits_RV: jax.Array, own_R: jax.Array, k: int, *, interpret: bool = False, tiles: TopTiles | None = None
) -> "sampling.TopValues":
    num_rows, vocab_size = logits_RV.shape
    if tiles is None:
        tiles = TopTiles(scan.pick_tiles(num_rows, vocab_size), scan.group_warps(vocab_size))
    per_split = jax.ShapeDtypeStruct((num_rows, tiles.scan.num_splits), jnp.float32)
    highest_RS, total_RS, count_RS, group_max_RG = triton_call(
        functools.partial(_scan_kernel, tiles=tiles.scan),
        name="top_scan",
        grid=per_split.shape,
        out_shape=(*(per_split,) * 3, jax.ShapeDtypeStruct((num_rows, scan.num_groups(vocab_size)), jnp.float32)),
        num_warps=tiles.scan.num_warps,
        num_stages=2,
        interpret=interpret,
    )(logits_RV, own_R)
    ids_RK, values_RK, rank_R, logsumexp_R = triton_call(
        functools.partial(_extract_kernel, k=k),
        name="top_extract",
        grid=(num_rows,),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, k), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, k), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        num_warps=tiles.extract_warps,
        num_stages=1,
        interpret=interpret,
    )(logits_RV, highest_RS, total_RS, count_RS, group_max_RG)
    return sampling.TopValues(ids_RK, values_RK, rank_R, logsumexp_R)


def _scan_kernel(logits_ref, own_ref, highest_ref, total_ref, count_ref, group_max_ref, *, tiles: scan.ScanTiles) -> None:
    row, split = pl.program_id(0), pl.program_id(1)
    one = jnp.float32(1)
    highest, total, count = scan.leave_group_maxima(
        scan.Logits(logits_ref), group_max_ref, row, split, one, own_ref[row], tiles
    )
    highest_ref[row, split] = highest
    total_ref[row, split] = total
    count_ref[row, split] = count


def _extract_kernel(
    logits_ref, highest_ref, total_ref, count_ref, group_max_ref, ids_ref, values_ref, rank_ref, logsumexp_ref, *, k: int
) -> None:
    row = pl.program_id(0)
    logits = scan.Logits(logits_ref)
    vocab_size, num_groups, num_splits = logits.vocab_size, group_max_ref.shape[1], highest_ref.shape[1]
    size = scan.group_size(vocab_size)
    split_s = jnp.arange(max(2, next_power_of_two(num_splits)))
    in_row_s = split_s < num_splits
    highest_s = load(highest_ref.at[row, split_s], mask=in_row_s, other=-jnp.inf)
    highest, total = scan.combine_totals(highest_s, load(total_ref.at[row, split_s], mask=in_row_s, other=0.0))
    logsumexp_ref[row] = scan.finite_or_zero(highest) + jnp.log(total)
    count_s = load(count_ref.at[row, split_s], mask=in_row_s, other=0.0)
    rank_ref[row] = jnp.sum(count_s, axis=0).astype(jnp.int32)

    group_G = jnp.arange(next_power_of_two(num_groups))
    max_G = load(group_max_ref.at[row, group_G], mask=group_G < num_groups, other=-jnp.inf)
    # A group with nothing left is past all others: -inf is a value like any other here.
    left_G = jnp.where(group_G < num_groups, jnp.minimum(size, vocab_size - group_G * size), 0)

    def body(i, carry):
        max_G, left_G = carry
        value = jnp.max(max_G, axis=0)
        group = jnp.min(jnp.where((max_G == value) & (left_G > 0), group_G, num_groups), axis=0)
        column_s = group * size + jnp.arange(size)
        x_s = logits.at(row, column_s)
        # Of a group, what was given out is larger than its maximum now, or equal and of a lower id: `taken` tells how many.
        taken = jnp.minimum(size, vocab_size - group * size) - jnp.sum(jnp.where(group_G == group, left_G, 0), axis=0)
        before = jnp.sum(jnp.where(x_s > value, 1, 0), axis=0)
        equal_s = (x_s == value) & (column_s < vocab_size)
        place_s = jnp.cumsum(jnp.where(equal_s, 1, 0)) - 1
        column = jnp.min(jnp.where(equal_s & (place_s == taken - before), column_s, vocab_size - 1), axis=0)
        ids_ref[row, i] = column
        values_ref[row, i] = value
        again = jnp.sum(jnp.where(equal_s, 1, 0), axis=0) > taken - before + 1
        rest = jnp.where(again, value, jnp.max(jnp.where(x_s < value, x_s, -jnp.inf), axis=0))
        here_G = group_G == group
        return jnp.where(here_G, rest, max_G), jnp.where(here_G, left_G - 1, left_G)

    lax.fori_loop(0, k, body, (max_G, left_G))
