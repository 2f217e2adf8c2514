"""Two Pallas-Triton kernels: one multiplies tokens with the A of their slots, the other these products with B.

             D                         Q = M * R                  N
    x  [t: -------]   @ a[slot].T = z [t: ----]   @ b[slot] = [t: ------------]
       splits of D: partial sums         summed up              the change of y

A program takes a tile of tokens with the same slot. The changes do not depend on y. Of few tokens, where y is soon there and waits for
weights, they are computed beside it, and XLA adds them in what comes next. Of many, XLA adds y to them: the product begins with them.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import dot_f32, load, num_cores, store, triton_call
from pallas_kernels.lora.groups import FEW_TOKENS, Groups
from pallas_kernels.lora.parts import Parts
from pallas_kernels.sizes import next_power_of_two

MAX_TOKENS_BESIDE = 256
"""Up to so many tokens, changes are computed beside y."""
NOTHING = -0.0
"""Added to any value, it leaves its bits: 0.0 would make 0.0 of -0.0."""


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
    shrink_stages: int = 3
    expand_warps: int = 4
    is_beside: bool = True
    """Whether y may be computed at the same time."""


def pick_tiling(num_tokens: int, num_tiles: int, width: int, rank: int, num_modules: int, itemsize: int) -> Tiling:
    is_few, is_beside = num_tokens <= FEW_TOKENS, num_tokens <= MAX_TOKENS_BESIDE
    block_q = min(64, max(16, next_power_of_two(num_modules * rank)))
    block_d, block_n = (128, 128 if is_few else 256) if itemsize < 4 else (32, 64)
    num_programs = num_tiles * pl.cdiv(num_modules * rank, block_q)
    num_splits = max(1, min(8, (1 if is_beside else 2) * num_cores() // num_programs, width // (2 * block_d)))
    block_r = max(16, min(64, next_power_of_two(rank)))
    return Tiling(block_q, block_d, num_splits, block_r, block_n, is_beside=is_beside)


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
    tiles = groups.tiles
    if tiles is None:
        block_m, num_tiles, lists = FEW_TOKENS, min(num_slots, num_tokens), [groups.slot_T]
    else:
        block_m, num_tiles = tiles.num_rows, len(tiles.slot_N)
        lists = [tiles.token_T, tiles.slot_N, tiles.start_N, tiles.count_N]
    tiling = tiling or pick_tiling(num_tokens, num_tiles, width, b_SRN.shape[1], parts.num_modules, x_TD.dtype.itemsize)
    num_splits = tiling.num_splits
    z_PTQ = triton_call(
        functools.partial(_shrink_kernel, num_lists=len(lists), block_m=block_m, tiling=tiling),
        name="lora_shrink",
        grid=(num_tiles, num_splits, pl.cdiv(num_rows, tiling.block_q)),
        out_shape=jax.ShapeDtypeStruct((num_splits, num_tokens, num_rows), jnp.float32 if num_splits > 1 else x_TD.dtype),
        num_warps=tiling.shrink_warps,
        num_stages=tiling.shrink_stages,
        interpret=interpret,
    )(*lists, x_TD, a_SQD)
    if num_splits > 1 and not tiling.is_beside:
        z_PTQ = jnp.sum(z_PTQ, axis=0, keepdims=True).astype(x_TD.dtype)
    num_blocks = parts.before * sum(pl.cdiv(size, tiling.block_n) for _, size in parts.runs())
    change_TN = triton_call(
        functools.partial(_expand_kernel, num_lists=len(lists), block_m=block_m, tiling=tiling, parts=parts, dtype=x_TD.dtype),
        name="lora_expand",
        grid=(num_tiles, num_blocks),
        out_shape=jax.ShapeDtypeStruct(y_TN.shape, y_TN.dtype),
        num_warps=tiling.expand_warps,
        num_stages=1,
        interpret=interpret,
    )(*lists, z_PTQ, b_SRN)
    if tiles is None:
        change_TN = jnp.where((groups.slot_T >= 0)[:, None], change_TN, NOTHING)
    if tiling.is_beside:  # else XLA adds within the product, which then cannot begin before the change is there
        y_TN, change_TN = lax.optimization_barrier((y_TN, change_TN))
    return y_TN + change_TN


def _tile(lists: Sequence[Any], block_m: int, num_slots: int, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slot of a tile, its tokens [M], and which of these there are."""
    tile, row_M = pl.program_id(0), jnp.arange(block_m)
    if len(lists) > 1:
        token_ref, slot_ref, start_ref, count_ref = lists
        is_own_M = row_M < count_ref[tile]
        return slot_ref[tile], load(token_ref.at[start_ref[tile] + row_M], mask=is_own_M, other=num_tokens), is_own_M
    slot_M = load(lists[0].at[row_M], mask=row_M < num_tokens, other=-1)
    if num_slots <= num_tokens:
        return tile, row_M, slot_M == tile
    # The slot of a token, unless an earlier token has the same.
    slot = jnp.sum(jnp.where(row_M == tile, slot_M, 0))
    is_known = _any((slot_M == slot) & (row_M < tile))
    return jnp.maximum(slot, 0), row_M, (slot_M == slot) & (slot >= 0) & ~is_known


def _any(is_M: jax.Array) -> jax.Array:
    return jnp.sum(is_M.astype(jnp.int32)) > 0


def _shrink_kernel(*refs: Any, num_lists: int, block_m: int, tiling: Tiling) -> None:
    """lists, x [T, D], a [S, Q, D] -> z [P, T, Q]."""
    lists, (x_ref, a_ref, z_ref) = refs[:num_lists], refs[num_lists:]
    (num_tokens, width), (num_slots, num_rows, _) = x_ref.shape, a_ref.shape
    split, block_d = pl.program_id(1), tiling.block_d
    slot, row_M, is_own_M = _tile(lists, block_m, num_slots, num_tokens)
    q_Q = pl.program_id(2) * tiling.block_q + jnp.arange(tiling.block_q)
    is_q_Q = q_Q < num_rows
    num_steps = pl.cdiv(pl.cdiv(width, block_d), tiling.num_splits)

    def step(i: jax.Array, sum_MQ: jax.Array) -> jax.Array:
        d_D = (split * num_steps + i) * block_d + jnp.arange(block_d)
        is_d_D = d_D < width
        x_MD = load(x_ref.at[row_M[:, None], d_D[None, :]], mask=is_own_M[:, None] & is_d_D[None, :], other=0.0)
        a_QD = load(a_ref.at[slot, q_Q[:, None], d_D[None, :]], mask=is_q_Q[:, None] & is_d_D[None, :], other=0.0)
        return sum_MQ + dot_f32(x_MD, a_QD.astype(x_MD.dtype).T)

    def compute() -> None:
        sum_MQ = lax.fori_loop(0, num_steps, step, jnp.zeros((block_m, tiling.block_q), jnp.float32))
        place = z_ref.at[split, row_M[:, None], q_Q[None, :]]
        store(place, sum_MQ.astype(z_ref.dtype), mask=is_own_M[:, None] & is_q_Q[None, :])

    pl.when(_any(is_own_M) & (slot < num_slots))(compute)


def _expand_kernel(*refs: Any, num_lists: int, block_m: int, tiling: Tiling, parts: Parts, dtype: DTypeLike) -> None:
    """lists, z [P, T, Q], b [S, R, N] -> the change [T, N], of few tokens those with a slot alone."""
    lists, (z_ref, b_ref, out_ref) = refs[:num_lists], refs[num_lists:]
    num_splits, num_tokens, _ = z_ref.shape
    num_slots, rank, _ = b_ref.shape
    block_r = tiling.block_r
    slot, row_M, is_own_M = _tile(lists, block_m, num_slots, num_tokens)
    module, n_N, is_n_N = _columns(parts, tiling.block_n)

    def step(i: Any, sum_MN: jax.Array) -> jax.Array:
        r_R = i * block_r + jnp.arange(block_r)
        is_r_R = r_R < rank
        b_RN = load(b_ref.at[slot, r_R[:, None], n_N[None, :]], mask=is_r_R[:, None] & is_n_N[None, :], other=0.0)
        z_MR = jnp.zeros((block_m, block_r), jnp.float32)
        for split in range(num_splits):
            place = z_ref.at[split, row_M[:, None], module * rank + r_R[None, :]]
            z_MR += load(place, mask=is_own_M[:, None] & is_r_R[None, :], other=0.0).astype(jnp.float32)
        return sum_MN + dot_f32(z_MR.astype(dtype), b_RN.astype(dtype))

    def write(sum_MN: jax.Array) -> None:
        mask_MN = is_own_M[:, None] & is_n_N[None, :]
        store(out_ref.at[row_M[:, None], n_N[None, :]], sum_MN.astype(out_ref.dtype), mask=mask_MN)

    def compute() -> None:
        sum_MN = jnp.zeros((block_m, tiling.block_n), jnp.float32)
        write(step(0, sum_MN) if rank <= block_r else lax.fori_loop(0, pl.cdiv(rank, block_r), step, sum_MN))

    pl.when(_any(is_own_M) & (slot < num_slots))(compute)
    if num_lists > 1:
        pl.when(_any(is_own_M) & (slot >= num_slots))(lambda: write(jnp.full((block_m, tiling.block_n), NOTHING, jnp.float32)))


def _columns(parts: Parts, block_n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The module of a block of columns, the columns [N], and which of them are the module's."""
    sizes = [size for _, size in parts.runs()]
    ends = list(itertools.accumulate(pl.cdiv(size, block_n) for size in sizes))
    period, block = lax.div(pl.program_id(1), ends[-1]), lax.rem(pl.program_id(1), ends[-1])
    module, begin, end = block * 0, block * block_n, block * 0 + sizes[0]
    for (first, size), blocks_before in zip(list(parts.runs())[1:], ends[:-1], strict=True):
        is_here = block >= blocks_before
        module += is_here.astype(jnp.int32)
        begin = jnp.where(is_here, first + (block - blocks_before) * block_n, begin)
        end += is_here.astype(jnp.int32) * size
    n_N = begin + jnp.arange(block_n)
    return module, period * sum(sizes) + n_N, n_N < end
