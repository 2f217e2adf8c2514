"""Two Pallas-Triton kernels: one multiplies tokens with the A of their slots, the other the sums with B.

                 D                        R
        x  [t: ------------]       z [t: ----]     b[slot] [R, N]
   a[slot] [Q, D] in splits        sums of splits  added to y, or apart

Of few tokens, the deltas are given apart: they do not depend on y, so that a GPU can compute them beside it, and XLA adds them in
what comes next. Of many, they are added in place.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import dot_f32, load, store, triton_call
from pallas_kernels.lora.groups import Groups, tile_rows
from pallas_kernels.lora.parts import Parts
from pallas_kernels.sizes import next_power_of_two


@dataclass(frozen=True)
class Tiling:
    """Tiles of both kernels."""

    block_q: int
    """Rows of A."""
    block_d: int
    num_splits: int
    """Programs that share the terms of a sum."""
    block_r: int
    block_n: int
    shrink_warps: int = 4
    expand_warps: int = 4
    shrink_stages: int = 3
    expand_stages: int = 1
    in_place: bool = False


def pick_tiling(num_tokens: int, width: int, rank: int, num_modules: int, itemsize: int) -> Tiling:
    is_few = tile_rows(num_tokens) >= num_tokens
    block_q = min(64, max(16, next_power_of_two(num_modules * rank)))
    block_d = 128 if itemsize < 4 else 32
    num_splits = 1
    if is_few:
        num_splits = max(1, min(16 // pl.cdiv(num_modules * rank, block_q), width // (2 * block_d)))
    return Tiling(block_q, block_d, num_splits, max(16, min(64, rank)), 128 if itemsize < 4 else 64, in_place=not is_few)


def supports(*, platform: str, dtype: DTypeLike, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16, jnp.float32)


def add(
    y_TN: jax.Array,
    x_TD: jax.Array,
    a_SQD: jax.Array,
    b_SRN: jax.Array,
    groups: Groups,
    *,
    parts: Parts,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> jax.Array:
    num_tokens, width = x_TD.shape
    num_slots, num_rows, _ = a_SQD.shape
    rank = b_SRN.shape[1]
    tiling = tiling or pick_tiling(num_tokens, width, rank, parts.num_modules, x_TD.dtype.itemsize)
    block_m = tile_rows(num_tokens)
    if groups.tiles is None:
        num_tiles, lists = min(num_slots, num_tokens), (groups.slot_T,)
    else:
        tiles = groups.tiles
        num_tiles, lists = len(tiles.slot_N), (tiles.token_T, tiles.slot_N, tiles.start_N, tiles.count_N)
    common = {"num_lists": len(lists), "block_m": block_m, "tiling": tiling}
    num_splits = tiling.num_splits
    z_PTQ = triton_call(
        functools.partial(_shrink_kernel, **common),
        name="lora_shrink",
        grid=(num_tiles, num_splits, pl.cdiv(num_rows, tiling.block_q)),
        out_shape=jax.ShapeDtypeStruct((num_splits, num_tokens, num_rows), x_TD.dtype if num_splits == 1 else jnp.float32),
        num_warps=tiling.shrink_warps,
        num_stages=tiling.shrink_stages,
        interpret=interpret,
    )(*lists, x_TD, a_SQD)
    blocks = [pl.cdiv(size, tiling.block_n) for _, size in parts.runs()]
    expand = triton_call(
        functools.partial(_expand_kernel, **common, parts=parts, dtype=x_TD.dtype),
        name="lora_expand",
        grid=(parts.before * sum(blocks), num_tiles),
        out_shape=jax.ShapeDtypeStruct(y_TN.shape, y_TN.dtype),
        num_warps=tiling.expand_warps,
        num_stages=tiling.expand_stages,
        interpret=interpret,
        input_output_aliases={len(lists) + 2: 0} if tiling.in_place else None,
    )
    if tiling.in_place:
        return expand(*lists, z_PTQ, b_SRN, y_TN)
    return y_TN + expand(*lists, z_PTQ, b_SRN)


def _rows(lists: Any, tile: jax.Array, block_m: int, num_slots: int, num_tokens: int) -> Any:
    """The slot of a tile, its tokens [M], and which of them there are; and of few tokens, which have no slot."""
    row_M = jnp.arange(block_m)
    if len(lists) == 1:
        slot_M = load(lists[0].at[row_M], mask=row_M < num_tokens, other=num_slots)
        if num_slots <= num_tokens:
            slot = tile
            is_own_M = slot_M == slot
        else:  # the slot of a token, unless an earlier token has the same
            slot = jnp.sum(jnp.where(row_M == tile, slot_M, 0))
            is_known = jnp.sum(((slot_M == slot) & (row_M < tile)).astype(jnp.int32)) == 0
            is_own_M = (slot_M == slot) & (slot >= 0) & is_known
            slot = jnp.maximum(slot, 0)
        return slot, row_M, is_own_M, (slot_M < 0) & (tile == 0)
    token_ref, slot_ref, start_ref, count_ref = lists
    is_own_M = row_M < count_ref[tile]
    return slot_ref[tile], load(token_ref.at[start_ref[tile] + row_M], mask=is_own_M, other=num_tokens), is_own_M, None


def _any(is_M: jax.Array) -> jax.Array:
    return jnp.sum(is_M.astype(jnp.int32)) > 0


def _shrink_kernel(*refs: Any, num_lists: int, block_m: int, tiling: Tiling) -> None:
    lists, (x_ref, a_ref, z_ref) = refs[:num_lists], refs[num_lists:]
    (num_tokens, width), (num_slots, num_rows, _) = x_ref.shape, a_ref.shape
    split = pl.program_id(1)
    slot, row_M, is_own_M, _ = _rows(lists, pl.program_id(0), block_m, num_slots, num_tokens)
    q_Q = pl.program_id(2) * tiling.block_q + jnp.arange(tiling.block_q)
    is_q_Q = q_Q < num_rows
    block_d = tiling.block_d
    steps = pl.cdiv(pl.cdiv(width, block_d), tiling.num_splits)

    @pl.when(_any(is_own_M))
    def _():
        def step(i: jax.Array, sum_MQ: jax.Array) -> jax.Array:
            d_D = (split * steps + i) * block_d + jnp.arange(block_d)
            is_d_D = d_D < width
            x_MD = load(x_ref.at[row_M[:, None], d_D[None, :]], mask=is_own_M[:, None] & is_d_D[None, :], other=0.0)
            a_QD = load(a_ref.at[slot, q_Q[:, None], d_D[None, :]], mask=is_q_Q[:, None] & is_d_D[None, :], other=0.0)
            return sum_MQ + dot_f32(x_MD, a_QD.astype(x_MD.dtype).T)

        sum_MQ = lax.fori_loop(0, steps, step, jnp.zeros((block_m, tiling.block_q), jnp.float32))
        mask_MQ = is_own_M[:, None] & is_q_Q[None, :]
        store(z_ref.at[split, row_M[:, None], q_Q[None, :]], sum_MQ.astype(z_ref.dtype), mask=mask_MQ)


def _expand_kernel(*refs: Any, num_lists: int, block_m: int, tiling: Tiling, parts: Parts, dtype: Any) -> None:
    lists, (z_ref, b_ref, *y_ref, out_ref) = refs[:num_lists], refs[num_lists:]
    num_splits, num_tokens, _ = z_ref.shape
    num_slots, rank, _ = b_ref.shape
    slot, row_M, is_own_M, is_none_M = _rows(lists, pl.program_id(1), block_m, num_slots, num_tokens)
    is_out_M = is_own_M if y_ref else is_own_M | is_none_M
    module, n_N, is_n_N = _columns(pl.program_id(0), parts, tiling.block_n)

    @pl.when(_any(is_out_M))
    def _():
        def step(i: jax.Array, sum_MN: jax.Array) -> jax.Array:
            r_R = i * tiling.block_r + jnp.arange(tiling.block_r)
            is_r_R = r_R < rank
            mask_MR = is_own_M[:, None] & is_r_R[None, :]
            z_MR = jnp.zeros((block_m, tiling.block_r), jnp.float32)
            for split in range(num_splits):
                place = z_ref.at[split, row_M[:, None], module * rank + r_R[None, :]]
                z_MR += load(place, mask=mask_MR, other=0.0).astype(jnp.float32)
            b_RN = load(b_ref.at[slot, r_R[:, None], n_N[None, :]], mask=is_r_R[:, None] & is_n_N[None, :], other=0.0)
            return sum_MN + dot_f32(z_MR.astype(dtype), b_RN.astype(dtype))

        sum_MN = jnp.zeros((block_m, tiling.block_n), jnp.float32)
        if rank <= tiling.block_r:
            sum_MN = step(0, sum_MN)
        else:
            sum_MN = lax.fori_loop(0, pl.cdiv(rank, tiling.block_r), step, sum_MN)
        mask_MN = is_out_M[:, None] & is_n_N[None, :]
        place = (row_M[:, None], n_N[None, :])
        if y_ref:
            sum_MN += load(y_ref[0].at[place], mask=mask_MN, other=0.0).astype(jnp.float32)
        else:  # what leaves y as it is, -0 too
            sum_MN = jnp.where(is_own_M[:, None], sum_MN, -0.0)
        store(out_ref.at[place], sum_MN.astype(out_ref.dtype), mask=mask_MN)


def _columns(block: jax.Array, parts: Parts, block_n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The module of a block of columns, the columns [N], and which of them are its module's."""
    (_, end), *others = parts.runs()
    before = pl.cdiv(end, block_n)
    num_blocks = sum(pl.cdiv(size, block_n) for _, size in parts.runs())
    period, left = lax.div(block, num_blocks), lax.rem(block, num_blocks)
    module, begin = left * 0, left * block_n
    for first, size in others:
        is_here = left >= before
        begin = jnp.where(is_here, first + (left - before) * block_n, begin)
        module += is_here.astype(jnp.int32)
        end += is_here.astype(jnp.int32) * size
        before += pl.cdiv(size, block_n)
    n_N = begin + jnp.arange(block_n)
    return module, period * (parts.num_columns // parts.before) + n_N, n_N < end
