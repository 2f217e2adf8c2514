"""The likeliest token and draws of every row, for Pallas-Triton, in three launches of which each row uses what it needs.

    scan    (R, splits)   greedy rows: the largest logit.  Random rows: the largest of logit + noise.
                          Filtered rows: the maxima of groups of columns, the highest, the sum of exponentials
    select  (R,)          filtered rows: a value that the filters' threshold is surely not below, and the groups that reach it
    finish  (R,)          combines the splits; filtered rows: draws out of those groups, or walks the whole row if they are many

No threshold of top_p is ever searched for exactly: a token y is kept if the tokens likelier than it hold less than p. So draw
from all that may be kept; if y is not kept, draw again from the likelier ones, with the same noise. The result is the same
token as that of a draw from exactly the kept ones. (Rejection with a rising pivot, as in FlashInfer's sorting-free sampling.)
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.sampling import Adjustments, DrawParams
from pallas_kernels.sampling import triton_scan as scan
from pallas_kernels.sampling.noise import gumbel_bits, gumbel_of_bits, uniform_of_bits
from pallas_kernels.sampling.order import value_of_key
from pallas_kernels.sizes import next_power_of_two

_TINY = 1.1754944e-38
_GREEDY, _RANDOM, _FILTERED = 0, 1, 2


@dataclass(frozen=True)
class DrawTiles:
    """Sizes of the three kernels."""

    scan: scan.ScanTiles
    max_groups: int = 512
    """Groups that `finish` takes into registers; rows in which more may matter are walked."""
    select_warps: int = 8
    finish_warps: int = 16
    walk_block: int = 2048


class _RowRefs(NamedTuple):
    """The parameters of rows, one array each."""

    kind: jax.Array
    scale: jax.Array
    log_min_p: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    word_0: jax.Array
    word_1: jax.Array


def pick_tiles(num_rows: int, vocab_size: int) -> DrawTiles:
    max_groups = min(512, next_power_of_two(scan.num_groups(vocab_size)))
    return DrawTiles(
        scan=scan.pick_tiles(num_rows, vocab_size),
        max_groups=max_groups,
        select_warps=scan.group_warps(vocab_size),
        walk_block=min(2048, max(128, next_power_of_two(vocab_size))),
    )


def argmax(logits_RV: jax.Array, *, interpret: bool = False, tiles: scan.ScanTiles | None = None) -> jax.Array:
    num_rows, vocab_size = logits_RV.shape
    if tiles is None:
        tiles = scan.pick_tiles(num_rows, vocab_size)
    per_split = (num_rows, tiles.num_splits)
    value_RS, id_RS = triton_call(
        functools.partial(_argmax_kernel, tiles=tiles),
        name="argmax",
        grid=per_split,
        out_shape=(jax.ShapeDtypeStruct(per_split, jnp.float32), jax.ShapeDtypeStruct(per_split, jnp.int32)),
        num_warps=tiles.num_warps,
        num_stages=2,
        interpret=interpret,
    )(logits_RV)
    if tiles.num_splits == 1:
        return id_RS[:, 0]
    return triton_call(
        _argmax_combine_kernel,
        name="argmax_combine",
        grid=(num_rows,),
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(value_RS, id_RS)


def draw(
    logits_RV: jax.Array,
    params: DrawParams,
    adjustments: Adjustments | None = None,
    *,
    interpret: bool = False,
    tiles: DrawTiles | None = None,
) -> jax.Array:
    num_rows, vocab_size = logits_RV.shape
    if tiles is None:
        tiles = pick_tiles(num_rows, vocab_size)
    top_k_R = jnp.where(params.top_k < vocab_size, params.top_k, 0)
    is_filtered_R = (top_k_R > 0) | (params.top_p < 1) | (params.log_min_p > -jnp.inf)
    kind_R = jnp.where(params.is_greedy, _GREEDY, jnp.where(is_filtered_R, _FILTERED, _RANDOM)).astype(jnp.int32)
    rows = _RowRefs(kind_R, params.scale, params.log_min_p, top_k_R, params.top_p, params.word_0, params.word_1)
    inputs = (logits_RV, *(adjustments or ()))
    per_split = (num_rows, tiles.scan.num_splits)
    call = functools.partial(triton_call, interpret=interpret)
    value_RS, id_RS, total_RS, group_max_RG = call(
        functools.partial(_scan_kernel, num_inputs=len(inputs), tiles=tiles.scan),
        name="draw_scan",
        grid=per_split,
        out_shape=(
            jax.ShapeDtypeStruct(per_split, jnp.float32),
            jax.ShapeDtypeStruct(per_split, jnp.int32),
            jax.ShapeDtypeStruct(per_split, jnp.float32),
            jax.ShapeDtypeStruct((num_rows, scan.num_groups(vocab_size)), jnp.float32),
        ),
        num_warps=tiles.scan.num_warps,
        num_stages=2,
    )(*inputs, *rows)
    group_RC, count_R = call(
        _select_kernel,
        name="draw_select",
        grid=(num_rows,),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, next_power_of_two(scan.num_groups(vocab_size))), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        ),
        num_warps=tiles.select_warps,
        num_stages=1,
    )(value_RS, total_RS, group_max_RG, *rows)
    return call(
        functools.partial(_finish_kernel, num_inputs=len(inputs), max_groups=tiles.max_groups, walk_block=tiles.walk_block),
        name="draw_finish",
        grid=(num_rows,),
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        num_warps=tiles.finish_warps,
        num_stages=1,
    )(*inputs, value_RS, id_RS, total_RS, group_RC, count_R, *rows)


def _argmax_kernel(logits_ref, value_ref, id_ref, *, tiles: scan.ScanTiles) -> None:
    row, split = pl.program_id(0), pl.program_id(1)
    value, token = _largest_logit(scan.Logits(logits_ref), row, split, tiles)
    value_ref[row, split] = value
    id_ref[row, split] = token


def _argmax_combine_kernel(value_ref, id_ref, token_ref) -> None:
    row = pl.program_id(0)
    token_ref[row] = _combine_splits(value_ref, id_ref, row)


def _logits(refs: Sequence[Any]) -> scan.Logits:
    """Of a kernel's first references: logits, and adjustments if there are any."""
    return scan.Logits(refs[0], Adjustments(*refs[1:]) if len(refs) > 1 else None)


def _scan_kernel(*refs, num_inputs: int, tiles: scan.ScanTiles) -> None:
    """One split of a row; which outputs it fills depends on the row's kind."""
    logits, refs = _logits(refs[:num_inputs]), refs[num_inputs:]
    rows = _RowRefs(*refs[: len(_RowRefs._fields)])
    value_ref, id_ref, total_ref, group_max_ref = refs[len(_RowRefs._fields) :]
    row, split = pl.program_id(0), pl.program_id(1)
    kind = rows.kind[row]

    @pl.when(kind == _GREEDY)
    def _():
        value, token = _largest_logit(logits, row, split, tiles)
        value_ref[row, split] = value
        id_ref[row, split] = token

    @pl.when(kind == _RANDOM)
    def _():
        begin, end = scan.tile_range(split, logits.vocab_size, tiles)
        best, token, _, _ = _walk(logits, rows, row, begin, end, tiles.block, shift=None)
        value_ref[row, split] = best
        id_ref[row, split] = token

    @pl.when(kind == _FILTERED)
    def _():
        highest, total, _ = scan.leave_group_maxima(logits, group_max_ref, row, split, rows.scale[row], None, tiles)
        value_ref[row, split] = highest
        total_ref[row, split] = total


def _select_kernel(value_ref, total_ref, group_max_ref, *refs) -> None:
    """List the groups that can hold a kept token, before the others, and count them."""
    rows = _RowRefs(*refs[: len(_RowRefs._fields)])
    group_ref, count_ref = refs[len(_RowRefs._fields) :]
    row = pl.program_id(0)
    num_groups = group_max_ref.shape[1]

    @pl.when(rows.kind[row] == _FILTERED)
    def _():
        highest, total = _load_totals(value_ref, total_ref, row)
        group_G = jnp.arange(next_power_of_two(num_groups))
        max_G = load(group_max_ref.at[row, group_G], mask=group_G < num_groups, other=-jnp.inf)
        log_min_p, top_k, top_p = rows.log_min_p[row], rows.top_k[row], rows.top_p[row]
        # The uppermost 20 bits: a bound below the true value is enough.
        ones_G = jnp.ones(group_G.shape, jnp.float32)
        by_count = _largest_reaching(max_G, ones_G, top_k.astype(jnp.float32), num_bits=_bits_if(top_k > 0, 20))
        # The likeliest token of each group: what a group holds at least. A little more than p, for the rounding of sums.
        least_target = jnp.maximum(top_p * total * 1.0001, _TINY)
        only_top_p = (top_p < 1) & (top_k == 0) & (log_min_p == -jnp.inf)
        weight_G = jnp.exp(max_G - scan.finite_or_zero(highest))
        by_weight = _largest_reaching(max_G, weight_G, least_target, num_bits=_bits_if(only_top_p, 20))
        bound = jnp.maximum(highest + log_min_p, jnp.maximum(by_count, by_weight))
        listed_G = (max_G >= bound) & (max_G > -jnp.inf)
        one_if_listed_G = jnp.where(listed_G, 1, 0)
        count = jnp.sum(one_if_listed_G, axis=0)
        num_before_G = jnp.cumsum(one_if_listed_G) - one_if_listed_G
        # The others come behind: each lane has a place of its own, so that none needs a mask.
        store(group_ref.at[row, jnp.where(listed_G, num_before_G, count + group_G - num_before_G)], group_G)
        count_ref[row] = count


def _finish_kernel(*refs, num_inputs: int, max_groups: int, walk_block: int) -> None:
    logits = _logits(refs[:num_inputs])
    value_ref, id_ref, total_ref, group_ref, count_ref, *rest, token_ref = refs[num_inputs:]
    rows = _RowRefs(*rest)
    row = pl.program_id(0)
    is_filtered = rows.kind[row] == _FILTERED
    is_listed = count_ref[row] <= max_groups

    @pl.when(jnp.logical_not(is_filtered))
    def _():
        token_ref[row] = _combine_splits(value_ref, id_ref, row)

    @pl.when(is_filtered & is_listed)
    def _():
        highest, total = _load_totals(value_ref, total_ref, row)
        token_ref[row] = _draw_from_groups(logits, group_ref, count_ref, rows, row, highest, total, max_groups)

    @pl.when(is_filtered & jnp.logical_not(is_listed))
    def _():
        highest, _ = _load_totals(value_ref, total_ref, row)
        token_ref[row] = _draw_from_row(logits, rows, row, highest, walk_block)


def _draw_from_groups(
    logits: scan.Logits, group_ref, count_ref, rows: _RowRefs, row, highest, total, max_groups: int
) -> jax.Array:
    """A draw out of the listed groups, all in registers."""
    vocab_size = logits.vocab_size
    size = scan.group_size(vocab_size)
    index_E = jnp.arange(max_groups * size)
    place_E = lax.div(index_E, size)
    listed_E = place_E < count_ref[row]
    group_E = load(group_ref.at[row, place_E], mask=listed_E, other=0)
    token_E = group_E * size + lax.rem(index_E, size)
    x_E = logits.at(row, token_E, listed_E) * rows.scale[row]
    top_k, top_p = rows.top_k[row], rows.top_p[row]
    ones_E = jnp.ones(x_E.shape, jnp.float32)
    kth = _largest_reaching(x_E, ones_E, top_k.astype(jnp.float32), num_bits=_bits_if(top_k > 0, 32))
    floor = jnp.maximum(highest + rows.log_min_p[row], kth)
    weight_E = jnp.where(x_E >= floor, jnp.exp(x_E - scan.finite_or_zero(highest)), 0.0)
    kept_total = jnp.where(floor > -jnp.inf, jnp.sum(weight_E, axis=0), total)
    target = _target(top_p, kept_total)
    bits_E = gumbel_bits(token_E.astype(jnp.uint32), rows.word_0[row], rows.word_1[row])
    noisy_E = jnp.where((x_E >= floor) & (x_E > -jnp.inf), x_E + gumbel_of_bits(bits_E), -jnp.inf)

    def likeliest_above(pivot):
        candidate_E = jnp.where(x_E > pivot, noisy_E, -jnp.inf)
        best = jnp.max(candidate_E, axis=0)
        token = jnp.min(jnp.where((candidate_E == best) & (best > -jnp.inf), token_E, vocab_size), axis=0)
        return token, jnp.max(jnp.where(token_E == token, x_E, -jnp.inf), axis=0)

    def raise_pivot(state):
        token, x, _ = state
        weight = jnp.sum(jnp.where(x_E > x, weight_E, 0.0), axis=0)
        likelier_token, likelier_x = likeliest_above(x)
        return _keep_or_replace(token, x, likelier_token, likelier_x, weight >= target)

    token, x = likeliest_above(jnp.float32(-jnp.inf))
    token, _, _ = lax.while_loop(lambda state: jnp.logical_not(state[2]), raise_pivot, (token, x, top_p >= 1))
    return jnp.where(token < vocab_size, token, 0)


def _draw_from_row(logits: scan.Logits, rows: _RowRefs, row, highest, block: int) -> jax.Array:
    """A draw by walks over the whole row: two of them and a few percent, more where a top_k beyond the list is asked for."""
    num_tiles = scan.ceil_div(logits.vocab_size, block)
    top_k, top_p = rows.top_k[row], rows.top_p[row]

    def num_reaching(value):
        def body(tile, count_b):
            column_b = tile * block + jnp.arange(block)
            reaches_b = logits.at(row, column_b) * rows.scale[row] >= value
            return count_b + jnp.where(reaches_b, 1.0, 0.0)

        return jnp.sum(lax.fori_loop(0, num_tiles, body, jnp.zeros((block,), jnp.float32)), axis=0)

    wanted = top_k.astype(jnp.float32)
    kth = _search(lambda value: num_reaching(value) >= wanted, num_bits=_bits_if(top_k > 0, 32))
    floor = jnp.maximum(highest + rows.log_min_p[row], kth)
    shift = scan.finite_or_zero(highest)

    def walk(pivot):
        _, token, x, weight = _walk(logits, rows, row, 0, num_tiles, block, floor=floor, pivot=pivot, shift=shift)
        return token, x, weight

    token, x, kept_total = walk(jnp.float32(-jnp.inf))
    target = _target(top_p, kept_total)

    def raise_pivot(state):
        token, x, _ = state
        likelier_token, likelier_x, weight = walk(x)
        return _keep_or_replace(token, x, likelier_token, likelier_x, weight >= target)

    token, _, _ = lax.while_loop(lambda state: jnp.logical_not(state[2]), raise_pivot, (token, x, top_p >= 1))
    return token


def _keep_or_replace(token, x, likelier_token, likelier_x, is_rejected) -> tuple[jax.Array, ...]:
    """(token, its scaled logit, whether it is kept). The logit rises with each replacement, so replacing ends."""
    replaces = is_rejected & (likelier_x > x)
    return jnp.where(replaces, likelier_token, token), jnp.where(replaces, likelier_x, x), jnp.logical_not(replaces)


def _walk(
    logits: scan.Logits, rows: _RowRefs, row, begin, end, block: int, *, shift, floor=None, pivot=None
) -> tuple[jax.Array, ...]:
    """The largest scaled logit plus noise: (it, token, its scaled logit, weight); -inf, 0, -inf if there is none above -inf.

    If a shift is given, only of those ≥ floor and > pivot, and weight is their sum of exp(scaled logit - shift).
    """
    scale, word_0, word_1 = rows.scale[row], rows.word_0[row], rows.word_1[row]

    def body(tile, carry):
        best, token, x, weight = carry
        column_b = tile * block + jnp.arange(block)
        x_b = scan.nan_is_highest(logits.at(row, column_b)) * scale
        if shift is not None:
            x_b = jnp.where((x_b >= floor) & (x_b > pivot), x_b, -jnp.inf)
            weight += jnp.sum(jnp.exp(x_b - shift), axis=0)
        bits_b = gumbel_bits(column_b.astype(jnp.uint32), word_0, word_1)
        # Noise is at most -log(uniform), so most tiles are done without its two exact logarithms: none can beat the best.
        bar = best - (0.001 + 2e-7 * jnp.abs(best))  # below it by more than all roundings
        can_win_b = uniform_of_bits(bits_b) < jnp.exp(x_b - bar)
        can_win_b |= (best == -jnp.inf) & (x_b > -jnp.inf)
        num_winners = jnp.sum(jnp.where(can_win_b, 1, 0), axis=0)

        def look():
            noisy_b = x_b + gumbel_of_bits(bits_b)
            highest = jnp.max(noisy_b, axis=0)
            column = jnp.min(jnp.where(noisy_b == highest, column_b, logits.vocab_size), axis=0)
            own = jnp.max(jnp.where(column_b == column, x_b, -jnp.inf), axis=0)
            wins = highest > best
            return jnp.where(wins, highest, best), jnp.where(wins, column, token), jnp.where(wins, own, x)

        best, token, x = lax.cond(num_winners > 0, look, lambda: (best, token, x))
        return best, token, x, weight

    none = jnp.float32(-jnp.inf)
    return lax.fori_loop(begin, end, body, (none, jnp.int32(0), none, jnp.float32(0)))


def _largest_logit(logits: scan.Logits, row, split, tiles: scan.ScanTiles) -> tuple[jax.Array, jax.Array]:
    """The largest logit of a split and its lowest column; -inf and the split's first column if there is none above."""
    begin, end = scan.tile_range(split, logits.vocab_size, tiles)
    lane_b = jnp.arange(tiles.block)

    def body(tile, carry):
        best_b, tile_b = carry
        x_b = scan.nan_is_highest(logits.at(row, tile * tiles.block + lane_b))
        wins_b = x_b > best_b
        return jnp.where(wins_b, x_b, best_b), jnp.where(wins_b, tile, tile_b)

    init = (jnp.full((tiles.block,), -jnp.inf, jnp.float32), jnp.zeros((tiles.block,), jnp.int32) + begin)
    best_b, tile_b = lax.fori_loop(begin, end, body, init)
    best = jnp.max(best_b, axis=0)
    token = jnp.min(jnp.where(best_b == best, tile_b * tiles.block + lane_b, jnp.iinfo(jnp.int32).max), axis=0)
    return best, token


def _combine_splits(value_ref, id_ref, row) -> jax.Array:
    """The token of the largest value of a row's splits, the lowest among equals."""
    num_splits = value_ref.shape[1]
    split_s = jnp.arange(max(2, next_power_of_two(num_splits)))
    value_s = load(value_ref.at[row, split_s], mask=split_s < num_splits, other=-jnp.inf)
    id_s = load(id_ref.at[row, split_s], mask=split_s < num_splits, other=jnp.iinfo(jnp.int32).max)
    return jnp.min(jnp.where(value_s == jnp.max(value_s, axis=0), id_s, jnp.iinfo(jnp.int32).max), axis=0)


def _load_totals(value_ref, total_ref, row) -> tuple[jax.Array, jax.Array]:
    num_splits = value_ref.shape[1]
    split_s = jnp.arange(max(2, next_power_of_two(num_splits)))
    highest_s = load(value_ref.at[row, split_s], mask=split_s < num_splits, other=-jnp.inf)
    total_s = load(total_ref.at[row, split_s], mask=split_s < num_splits, other=0.0)
    return scan.combine_totals(highest_s, total_s)


def _target(top_p, kept_total) -> jax.Array:
    """The weight at which likelier tokens suffice without a token; the likeliest stays however small p is."""
    return jnp.where(top_p < 1, jnp.maximum(top_p * kept_total, _TINY), jnp.inf)


def _largest_reaching(values_E, weight_E, target, *, num_bits: jax.Array) -> jax.Array:
    """The largest float whose values ≥ it weigh at least the target, or, of fewer than 32 bits, a float not much below."""
    return _search(lambda value: jnp.sum(jnp.where(values_E >= value, weight_E, 0.0), axis=0) >= target, num_bits)


def _bits_if(wanted: jax.Array, num_bits: int) -> jax.Array:
    return wanted.astype(jnp.int32) * num_bits


def _search(suffices, num_bits: jax.Array) -> jax.Array:
    """The largest float for which `suffices` holds, which it must for all below it too; -inf if none or of 0 bits."""

    def settle(_, carry):
        key, bit = carry
        return jnp.where(suffices(value_of_key(key | bit)), key | bit, key), bit >> 1

    key, _ = lax.fori_loop(jnp.int32(0), num_bits, settle, (jnp.uint32(0), jnp.uint32(1 << 31)))
    return value_of_key(key)
