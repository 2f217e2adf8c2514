"""Paged decode attention for Pallas-Triton: one query token per row, keys and values split over several programs (split-KV).

    kv positions of row r   0 ........ block_k ....... 2 block_k ....... length
                            [--- program split 0 ---][--- program split 1 ---]      x  K heads  x  R rows
                                     |                        |
                              (out, lse)_0             (out, lse)_1   --combine-->  out_RKGH

A program holds the G query heads of one KV head as the rows of a 16-row tile (rows past G are masked), walks its range of keys
in tiles of block_k tokens (block_k/S pages, gathered through the page table), and keeps the softmax online in base 2
(Milakov and Gimelshein 2018; split-KV as in Flash-Decoding, Dao et al. 2023). With one split it writes the result itself.
Of W queries a row, the tile holds the W * G query heads that share its keys; each query has its own last key.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

from pallas_kernels._compat import dot_f32, load, num_cores, store, triton_call
from pallas_kernels.paged_attention.parts import NO_KEYS, Part, combine
from pallas_kernels.paged_attention.queries import in_parts
from pallas_kernels.sizes import next_power_of_two

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a wholly masked tile gives no NaN; the first valid score wipes what it added
MAX_LINES = 64
"""Query heads of a few queries that a program holds; more go in parts."""


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the decode kernel. Two tiles are in flight only from five stages on: the load of page ids takes stages too."""

    block_k: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 5


def pick_tiles(
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_slots: int,
    window: int | None = None,
    num_queries: int = 1,
) -> DecodeTiles:
    """Sizes for a shape. num_slots is the width of the page table in tokens: the longest that a row can be."""
    padded_dim = next_power_of_two(head_dim)
    block_k = max(16, min(64, 64 * 128 * 2 // (padded_dim * itemsize)))
    longest = num_slots if window is None else min(num_slots, window + block_k)
    # Of few rows most may be padding, which costs nothing: split as for a single one.
    num_pairs = num_kv_heads * (1 if num_rows <= 8 else num_rows)
    if num_pairs >= num_cores():
        # Two even out the last wave; of narrow heads they would be too short for that to pay, and of several queries there is
        # more to merge than that saves (measured).
        wanted = 2 if num_pairs < 8 * num_cores() and padded_dim * itemsize >= 256 and num_queries == 1 else 1
    else:
        wanted = 2 * num_cores() // num_pairs
    # A split below four tiles costs more in the combination than it gains.
    num_splits = max(1, min(wanted, longest // (4 * block_k), 64))
    return DecodeTiles(block_k=block_k, num_splits=num_splits)


def paged_decode(
    q_RKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks_KG: jax.Array | None = None,
    num_queries: int = 1,
    part: Part | None = None,
    interpret: bool = False,
    tiles: DecodeTiles | None = None,
) -> Any:
    num_rows, num_kv_heads, num_groups, head_dim = q_RKGH.shape
    if num_queries * num_groups > MAX_LINES and num_queries > 1:
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        options |= {"sinks_KG": sinks_KG, "interpret": interpret, "tiles": tiles, "num_queries": num_queries}
        most, pages = max(1, MAX_LINES // num_groups), (k_pages_PKSH, v_pages_PKSH)
        return in_parts(paged_decode, most, (q_RKGH,), pages, page_table_RB, kv_length_R, **options)
    num_rows //= num_queries
    page_size = k_pages_PKSH.shape[2]
    num_slots = page_table_RB.shape[1] * page_size
    if tiles is None:
        tiles = pick_tiles(num_rows, num_kv_heads, head_dim, k_pages_PKSH.dtype.itemsize, num_slots, window, num_queries)
    splits = tiles.num_splits
    kernel = functools.partial(
        _decode_kernel,
        num_queries=num_queries,
        block_k=tiles.block_k,
        num_splits=splits,
        score_scale=scale * LOG2E,
        soft_cap=None if soft_cap is None else soft_cap * LOG2E,
        window=window,
        has_kv_scale=k_scale is not None or v_scale is not None,
        has_sinks=sinks_KG is not None and splits == 1,
        num_parts=None if part is None else part.count,
    )
    is_whole = splits == 1 and part is None
    out_shape = jax.ShapeDtypeStruct(q_RKGH.shape, q_RKGH.dtype)
    partial_shape = (
        jax.ShapeDtypeStruct((splits, *q_RKGH.shape), jnp.float32),
        jax.ShapeDtypeStruct((splits, *q_RKGH.shape[:-1]), jnp.float32),
    )
    sinks = () if sinks_KG is None else (sinks_KG,)
    result = triton_call(
        kernel,
        name="paged_decode",
        grid=(num_kv_heads, num_rows, splits),
        out_shape=out_shape if is_whole else partial_shape,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(
        q_RKGH,
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        kv_length_R,
        *kv_scale_operand(k_scale, v_scale),
        *(sinks if splits == 1 else ()),
        *rank_operand(part),
    )
    if is_whole:
        return result
    if part is not None:
        out_sRKGH, lse_sRKG = result
        lse_sRKG = jnp.where(lse_sRKG == MASKED, NO_KEYS, lse_sRKG * math.log(2))
        return combine(out_sRKGH, lse_sRKG).astype(q_RKGH.dtype), jax.nn.logsumexp(lse_sRKG, axis=0)
    return triton_call(
        _combine_kernel,
        name="paged_decode_combine",
        grid=(num_kv_heads * num_groups, len(q_RKGH)),
        out_shape=out_shape,
        num_warps=1 if splits <= 8 else 4,
        num_stages=1,
        interpret=interpret,
    )(*result, *sinks)


def kv_scale_operand(k_scale: ArrayLike | None, v_scale: ArrayLike | None) -> tuple[jax.Array, ...]:
    """The scales as one operand of a kernel, float32 [2], if there is any."""
    if k_scale is None and v_scale is None:
        return ()
    scales = [jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(()) for scale in (k_scale, v_scale)]
    return (jnp.stack(scales),)


def rank_operand(part: Part | None) -> tuple[jax.Array, ...]:
    """The rank of a part as an operand of a kernel, int32 [1], if there is one."""
    return () if part is None else (jnp.asarray(part.rank, jnp.int32).reshape(1),)


def optional_refs(refs: Sequence[Any], has_kv_scale: bool, has_sinks: bool) -> tuple[Any, ...]:
    """A kernel's references behind its arrays, with None for each optional operand that is not there: kv_scale [2], sinks [K, G]."""
    found = iter(refs)
    return (next(found) if has_kv_scale else None, next(found) if has_sinks else None, *found)


def sink_start(sinks_ref: Any, head: jax.Array, group_M: jax.Array, mask_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maximum, in base 2, and sum of the softmax before the first key: those of the sink, a score of a value of zero."""
    sink_M = load(sinks_ref.at[head, group_M], mask=mask_M, other=0.0)
    return sink_M * LOG2E, jnp.ones_like(sink_M)


def compute_type(q_dtype: jax.typing.DTypeLike, cache_dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """What products are computed in: the wider of both types; every float8_e4m3fn is exact in each of the others."""
    return jnp.dtype(q_dtype) if jnp.dtype(cache_dtype).itemsize == 1 else jnp.promote_types(q_dtype, cache_dtype)


def cap_scores(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), of one exponential: exact at both ends, where exp2 gives 0 or inf."""
    return cap - (2 * cap) / (1 + jnp.exp2(scores * (2 * LOG2E / cap)))


def _decode_kernel(
    q_ref,  # [R * W, K, G, H]
    k_ref,  # [P, K, S, H]
    v_ref,  # [P, K, S, H]
    table_ref,  # [R, B]
    length_ref,  # [R]
    *refs,  # see `optional_refs`, `rank_operand`; out as q; or out [splits, R * W, K, G, H] float32, lse [splits, R * W, K, G] base 2
    has_kv_scale: bool,
    has_sinks: bool,
    num_parts: int | None,
    num_queries: int,
    block_k: int,
    num_splits: int,
    score_scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    kv_scale_ref, sinks_ref, *others = optional_refs(refs, has_kv_scale, has_sinks)
    part = None if num_parts is None else Part(others.pop(0)[0], num_parts)
    out_ref, *lse_refs = others
    _, _, num_groups, head_dim = q_ref.shape
    page_size, table_width = k_ref.shape[2], table_ref.shape[1]
    dtype = compute_type(q_ref.dtype, k_ref.dtype)
    if k_ref.dtype.itemsize == 1 and dtype == jnp.bfloat16:
        dtype = jnp.dtype(jnp.float16)  # what two numbers of 8 bits become in one instruction; queries up to 65504
    if kv_scale_ref is not None:
        score_scale *= kv_scale_ref[0]
    head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    num_lines = num_queries * num_groups
    line_M = jnp.arange(max(16, next_power_of_two(num_lines)))
    group_M, token_M = line_M, row
    if num_queries > 1:
        query_M = lax.div(line_M, num_groups)
        group_M, token_M = lax.rem(line_M, num_groups), row * num_queries + query_M
    token_M1 = token_M if num_queries == 1 else token_M[:, None]
    dim_H = jnp.arange(next_power_of_two(head_dim))
    in_dim_1H = (dim_H < head_dim)[None, :]
    q_mask_MH = (line_M < num_lines)[:, None] & in_dim_1H

    length = length_ref[row]
    first_position = 0 if window is None else jnp.maximum(length - (window + num_queries - 1), 0)
    first_tile = 0 if window is None else lax.div(first_position, block_k)
    if part is not None:
        length = part.keys_before(length, page_size)
        if window is not None:
            first_position = part.keys_before(jnp.asarray(first_position), page_size)
            # All keys in the window may be in other parts.
            length = jnp.where(first_position < length, length, 0)
            first_tile = lax.div(jnp.minimum(first_position, length), block_k)
    end_tile = lax.div(length + (block_k - 1), block_k)
    per_split = lax.div(end_tile - first_tile + (num_splits - 1), num_splits)
    begin = first_tile + split * per_split
    end = jnp.minimum(begin + per_split, end_tile)

    q_MH = load(q_ref.at[token_M1, head, group_M[:, None], dim_H[None, :]], mask=q_mask_MH, other=0.0).astype(dtype)

    def seen_by_each(position_k):
        """Of keys that a query of the row sees, those that each query sees."""
        end_M1 = (length - (num_queries - 1) + query_M)[:, None]
        seen_Mk = position_k[None, :] < end_M1
        return seen_Mk if window is None else seen_Mk & (position_k[None, :] >= end_M1 - window)

    def body(tile, carry):
        acc_MH, max_M, sum_M = carry
        position_k = tile * block_k + jnp.arange(block_k)
        valid_k = position_k < length
        if window is not None:
            valid_k &= position_k >= first_position
        page_index_k = lax.div(position_k, page_size)
        if (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        page_k1 = load(table_ref.at[row, page_index_k])[:, None]
        offset_k1 = lax.rem(position_k, page_size)[:, None]
        mask_kH = jnp.broadcast_to(valid_k[:, None] & in_dim_1H, (block_k, dim_H.shape[0]))
        # Lanes outside the row's own slots load nothing and give 0: what lies there may be NaN.
        k_kH = load(k_ref.at[page_k1, head, offset_k1, dim_H[None, :]], mask=mask_kH, other=0.0).astype(dtype)
        scores_Mk = dot_f32(q_MH, k_kH.T) * score_scale
        if soft_cap is not None:
            scores_Mk = cap_scores(scores_Mk, soft_cap)
        scores_Mk = jnp.where(valid_k[None, :] if num_queries == 1 else seen_by_each(position_k), scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        v_kH = load(v_ref.at[page_k1, head, offset_k1, dim_H[None, :]], mask=mask_kH, other=0.0).astype(dtype)
        acc_MH = acc_MH * shrink_M[:, None] + dot_f32(weights_Mk.astype(dtype), v_kH)
        return acc_MH, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    m = group_M.shape[0]
    init = (jnp.zeros((m, dim_H.shape[0]), jnp.float32), jnp.full((m,), MASKED, jnp.float32), jnp.zeros((m,), jnp.float32))
    if sinks_ref is not None:
        init = (init[0], *sink_start(sinks_ref, head, group_M, line_M < num_lines))
    acc_MH, max_M, sum_M = lax.fori_loop(begin, end, body, init)
    safe_sum_M = jnp.where(sum_M == 0, 1.0, sum_M)
    out_MH = acc_MH / safe_sum_M[:, None]
    if kv_scale_ref is not None:
        out_MH *= kv_scale_ref[1]
    if num_splits == 1 and part is None:
        store(out_ref.at[token_M1, head, group_M[:, None], dim_H[None, :]], out_MH.astype(out_ref.dtype), mask=q_mask_MH)
        return
    lse_M = jnp.where(sum_M == 0, MASKED, max_M + jnp.log2(safe_sum_M))
    store(out_ref.at[split, token_M1, head, group_M[:, None], dim_H[None, :]], out_MH, mask=q_mask_MH)
    (lse_ref,) = lse_refs
    store(lse_ref.at[split, token_M, head, group_M], lse_M, mask=line_M < num_lines)


def _combine_kernel(partial_ref, lse_ref, *refs) -> None:
    """The splits of one query head, weighted by their share of the softmax sum; a split without keys has weight 0.

    refs: sinks [K, G] if there are any; out.
    """
    *sinks_refs, out_ref = refs
    num_splits, _, _, num_groups, head_dim = partial_ref.shape
    row = pl.program_id(1)
    head, group = lax.div(pl.program_id(0), num_groups), lax.rem(pl.program_id(0), num_groups)
    split_s = jnp.arange(max(2, next_power_of_two(num_splits)))
    dim_H = jnp.arange(next_power_of_two(head_dim))
    in_dim_H = dim_H < head_dim
    lse_s = load(lse_ref.at[split_s, row, head, group], mask=split_s < num_splits, other=MASKED)
    top = lse_s.max(axis=0)
    sink = sinks_refs[0][head, group] * LOG2E if sinks_refs else None
    if sink is not None:
        top = jnp.maximum(top, sink)
    weight_s = jnp.exp2(lse_s - top)
    mask_sH = (split_s < num_splits)[:, None] & in_dim_H[None, :]
    partial_sH = load(partial_ref.at[split_s[:, None], row, head, group, dim_H[None, :]], mask=mask_sH, other=0.0)
    acc_H = (partial_sH * weight_s[:, None]).sum(axis=0)
    sum_ = weight_s.sum(axis=0)
    if sink is not None:
        sum_ += jnp.exp2(sink - top)
    out_H = acc_H / sum_
    store(out_ref.at[row, head, group, dim_H], out_H.astype(out_ref.dtype), mask=in_dim_H)
