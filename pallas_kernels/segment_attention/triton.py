"""Segment attention for Pallas-Triton.

    patches     0 ..... segment 0 ..... | . 1 . | .......... segment 2 .......... | padding
    tiles       [--------][--------][--------][--------][--------][--------][--------]      x  H heads
    keys        0 ......  0 .............................................
                                    2 ...............................

A program holds the queries of one tile for one head and walks the keys that any of them sees, in chunks: a tile inside of one
segment without a mask but for the last chunk, another within the bounds of each query (FlashAttention-2, Dao 2023).

Triton's tiles have powers of two as sizes. A head of 72 or 80 values is cut into parts of 64 and 16, which takes fewer products than
one of 128.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import dot_f32, load, store, triton_call
from pallas_kernels.segment_attention.parts import MIN_PART, head_parts
from pallas_kernels.segment_attention.segments import bounds, tile_keys

LOG2E = math.log2(math.e)
MASKED = -1e30  # a finite score: a query may see nothing of a chunk


@dataclass(frozen=True)
class SegmentTiles:
    """Sizes of the kernel: queries of a tile, keys of a chunk."""

    block_m: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3


def pick_tiles(head_dim: int, itemsize: int) -> SegmentTiles:
    """Sizes for a head width."""
    if itemsize > 2:  # full float32 products run without tensor cores and hold their operands in registers
        return SegmentTiles(block_m=16, block_k=32 if head_dim < 128 else 16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return SegmentTiles(block_m=64, num_warps=4)
    return SegmentTiles()


def segment_attention(
    q_PHd: jax.Array,
    k_PHd: jax.Array,
    v_PHd: jax.Array,
    segment_P: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
    tiles: SegmentTiles | None = None,
) -> jax.Array:
    _, num_heads, head_dim = q_PHd.shape
    tiles = tiles or pick_tiles(head_dim, q_PHd.dtype.itemsize)
    start_P, end_P = bounds(segment_P)
    keys_N3 = tile_keys(start_P, end_P, tiles.block_m)
    return triton_call(
        functools.partial(_kernel, block_m=tiles.block_m, block_k=tiles.block_k, score_scale=scale * LOG2E),
        name="segment_attention",
        grid=(len(keys_N3), num_heads),
        out_shape=jax.ShapeDtypeStruct(q_PHd.shape, q_PHd.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_PHd, k_PHd, v_PHd, start_P, end_P, keys_N3)


def _kernel(
    q_ref: Any,  # [P, H, d]
    k_ref: Any,  # [P, H, d]
    v_ref: Any,  # [P, H, d]
    start_ref: Any,  # [P]
    end_ref: Any,  # [P]
    keys_ref: Any,  # [N, 3]
    out_ref: Any,  # [P, H, d]
    *,
    block_m: int,
    block_k: int,
    score_scale: float,
) -> None:
    num_patches, _, head_dim = q_ref.shape
    parts = head_parts(head_dim)
    tile, head = pl.program_id(0), pl.program_id(1)
    first, end, sees_all = (keys_ref[tile, column] for column in range(3))

    def place(patch_M: Any, is_used_M: Any, part: tuple[int, int]) -> tuple[Any, Any]:
        """Index and mask of a part of the heads of some patches. is_used_M None: all are; mask None: all of it is."""
        dim_1d = (part[0] + jnp.arange(part[1]))[None, :]
        masks = [] if is_used_M is None else [is_used_M[:, None]]
        if sum(part) > head_dim:
            masks.append(dim_1d < head_dim)
        mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (len(patch_M), part[1])) if masks else None
        return (patch_M[:, None], head, dim_1d), mask

    def load_part(ref: Any, patch_M: Any, is_used_M: Any, part: tuple[int, int]) -> Any:
        index, mask = place(patch_M, is_used_M, part)
        return load(ref.at[index], mask=mask, other=None if mask is None else 0.0)

    patch_M = tile * block_m + jnp.arange(block_m)
    in_array_M = None if num_patches % block_m == 0 else patch_M < num_patches
    start_M, end_M = (
        load(ref.at[patch_M], mask=in_array_M, other=None if in_array_M is None else 0) for ref in (start_ref, end_ref)
    )
    is_real_M = end_M > 0
    q_parts = [load_part(q_ref, patch_M, is_real_M, part) for part in parts]

    def body(index: Any, carry: Any, *, masked: bool) -> Any:
        accs, max_M, sum_M = carry
        key_k = first + index * block_k + jnp.arange(block_k)
        is_read_k = key_k < end if masked else None
        scores_Mk = functools.reduce(
            jnp.add,
            (dot_f32(q, load_part(k_ref, key_k, is_read_k, part).T) for q, part in zip(q_parts, parts, strict=True)),
        )
        left_scale = score_scale
        if masked:
            # Scaled before the mask: a masked score must equal a masked maximum exactly.
            left_scale = 1.0
            is_seen_Mk = (key_k[None, :] >= start_M[:, None]) & (key_k[None, :] < end_M[:, None])
            scores_Mk = jnp.where(is_seen_Mk, scores_Mk * score_scale, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1) * left_scale)
        weights_Mk = jnp.exp2(scores_Mk * left_scale - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        low_Mk = weights_Mk.astype(v_ref.dtype)
        accs = tuple(
            acc_Md * shrink_M[:, None] + dot_f32(low_Mk, load_part(v_ref, key_k, is_read_k, part))
            for acc_Md, part in zip(accs, parts, strict=True)
        )
        return accs, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    carry = (
        tuple(jnp.zeros((block_m, size), jnp.float32) for _, size in parts),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    num_chunks = lax.div(end - first + (block_k - 1), block_k)
    whole = jnp.where(sees_all == 1, lax.div(end - first, block_k), 0)
    carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
    accs, _, sum_M = lax.fori_loop(whole, num_chunks, functools.partial(body, masked=True), carry)
    inverse_M = jnp.where(is_real_M, 1.0 / jnp.where(sum_M == 0.0, 1.0, sum_M), 0.0)
    for acc_Md, part in zip(accs, parts, strict=True):
        index, mask = place(patch_M, in_array_M, part)
        store(out_ref.at[index], (acc_Md * inverse_M[:, None]).astype(out_ref.dtype), mask=mask)


def supports(*, platform: str, dtype: DTypeLike, head_dim: int, interpret: bool = False) -> bool:
    is_float = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
    return (platform == "gpu" or interpret) and is_float and MIN_PART <= head_dim <= 256
