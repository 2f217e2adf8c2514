"""Latent decode attention for Pallas-Triton: one query token per row, its keys split over several programs (split-KV).

    vector of a token   [----------- L: latent -----------|-- E: rotated key --]
    key of all heads    [------------------------------------------------------]
    value of all heads  [---------------------------------]

A program holds up to 64 query heads as the rows of a tile and walks its range of keys in tiles of block_k tokens, gathered through
the page table. Each latent is loaded once, for the scores and for the sum, and shared by all heads: with 16 heads there are 30
operations for each byte. The softmax is kept online in base 2 (Milakov and Gimelshein 2018); splits are merged as in
Flash-Decoding (Dao et al. 2023). With one split a program writes the result itself. The heads of W queries a row are W * N heads.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import dot_f32, load, num_cores, store, triton_call
from pallas_kernels.paged_attention.triton_decode import LOG2E, MASKED, compute_type
from pallas_kernels.sizes import next_power_of_two

MAX_HEADS = 64
"""Of a program: what registers hold the sum of."""


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the decode kernel: heads and keys of a tile, programs that share a row's keys."""

    block_m: int
    block_k: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 5


def pick_tiles(num_rows: int, num_heads: int, latent_dim: int, itemsize: int, num_slots: int) -> DecodeTiles:
    """Sizes for a shape. num_slots is the width of the page table in tokens: the longest that a row can be."""
    # Queries in shared memory must leave room for tiles of keys.
    block_m = min(MAX_HEADS if itemsize <= 2 else 16, max(16, next_power_of_two(num_heads)))
    block_k = max(16, 32 * 512 * 2 // (max(512, next_power_of_two(latent_dim)) * itemsize))
    # Of few rows most may be padding, which costs nothing: split as for a single one.
    is_few = num_rows <= 8
    num_pairs = -(-num_heads // block_m) * (1 if is_few else num_rows)
    wanted = max(1, 2 * num_cores() // num_pairs)
    # A split below four tiles costs more in the combination than it gains.
    num_splits = max(1, min(wanted, num_slots // (4 * block_k), 64))
    if block_m > 16:
        return DecodeTiles(block_m, block_k, num_splits, num_warps=8, num_stages=3)
    # A program of few rows has few tiles, which many stages do not help, but their start costs.
    return DecodeTiles(block_m, block_k, num_splits, num_warps=4, num_stages=2 if is_few else 5)


def latent_decode(
    q_RNL: jax.Array,
    q_RNE: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    num_queries: int = 1,
    interpret: bool = False,
    tiles: DecodeTiles | None = None,
) -> jax.Array:
    asked = q_RNL.shape
    if num_queries > 1:
        # The queries of a row are more heads.
        q_RNL, q_RNE = (q.reshape(-1, num_queries * q.shape[1], q.shape[2]) for q in (q_RNL, q_RNE))
    num_rows, num_lines, latent_dim = q_RNL.shape
    num_slots = page_table_RB.shape[1] * pages_P1SC.shape[2]
    if tiles is None:
        itemsize = compute_type(q_RNL.dtype, pages_P1SC.dtype).itemsize
        tiles = pick_tiles(num_rows, num_lines, latent_dim, itemsize, num_slots)
    splits = tiles.num_splits
    kernel = functools.partial(
        _decode_kernel,
        num_queries=num_queries,
        block_m=tiles.block_m,
        block_k=tiles.block_k,
        num_splits=splits,
        score_scale=scale * LOG2E,
    )
    shape = q_RNL.shape
    out_shape = jax.ShapeDtypeStruct(shape, q_RNL.dtype)
    partial_shape = (
        jax.ShapeDtypeStruct((splits, *shape), jnp.float32),
        jax.ShapeDtypeStruct((splits, *shape[:-1]), jnp.float32),
    )
    result = triton_call(
        kernel,
        name="latent_decode",
        grid=(-(-num_lines // tiles.block_m), num_rows, splits),
        out_shape=out_shape if splits == 1 else partial_shape,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_RNL, q_RNE, pages_P1SC, page_table_RB, kv_length_R)
    if splits == 1:
        return result.reshape(asked) if num_queries > 1 else result
    result = triton_call(
        _combine_kernel,
        name="latent_decode_combine",
        grid=(num_lines, num_rows),
        out_shape=out_shape,
        num_warps=1 if splits <= 8 else 4,
        num_stages=1,
        interpret=interpret,
    )(*result)
    return result.reshape(asked) if num_queries > 1 else result


def _decode_kernel(
    q_ref,  # [R, W * N, L]
    q_rotated_ref,  # [R, W * N, E]
    pages_ref,  # [P, 1, S, C]
    table_ref,  # [R, B]
    length_ref,  # [R]
    *out_refs,  # out [R, W * N, L]; or out [splits, R, W * N, L] float32 and lse [splits, R, W * N] base 2
    num_queries: int,
    block_m: int,
    block_k: int,
    num_splits: int,
    score_scale: float,
) -> None:
    out_ref, *lse_refs = out_refs
    num_lines, latent_dim = q_ref.shape[1:]
    page_size, table_width = pages_ref.shape[2], table_ref.shape[1]
    dtype = compute_type(q_ref.dtype, pages_ref.dtype)
    row, split = pl.program_id(1), pl.program_id(2)
    line_M = pl.program_id(0) * block_m + jnp.arange(block_m)
    parts = [Part.of(0, latent_dim), Part.of(latent_dim, pages_ref.shape[3])]

    length = length_ref[row]
    end_tile = lax.div(length + (block_k - 1), block_k)
    per_split = lax.div(end_tile + (num_splits - 1), num_splits)
    begin = split * per_split
    end = jnp.minimum(begin + per_split, end_tile)
    q_ML, q_ME = (
        Part.of(0, ref.shape[-1]).load(ref, (row, line_M[:, None]), line_M < num_lines).astype(dtype)
        for ref in (q_ref, q_rotated_ref)
    )

    def body(tile, carry):
        acc_ML, max_M, sum_M = carry
        position_k = tile * block_k + jnp.arange(block_k)
        valid_k = position_k < length
        page_index_k = lax.div(position_k, page_size)
        if (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        page_k1 = load(table_ref.at[row, page_index_k])[:, None]
        offset_k1 = lax.rem(position_k, page_size)[:, None]
        # Lanes outside the row's own slots load nothing and give 0: what lies there may be NaN.
        latent_kL, rotated_kE = (part.load(pages_ref, (page_k1, 0, offset_k1), valid_k).astype(dtype) for part in parts)
        scores_Mk = (dot_f32(q_ML, latent_kL.T) + dot_f32(q_ME, rotated_kE.T)) * score_scale
        seen = valid_k[None, :]
        if num_queries > 1:
            behind_M = num_queries - 1 - lax.div(line_M, num_lines // num_queries)
            seen = position_k[None, :] < (length - behind_M)[:, None]
        scores_Mk = jnp.where(seen, scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        acc_ML = acc_ML * shrink_M[:, None] + dot_f32(weights_Mk.astype(dtype), latent_kL)
        return acc_ML, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    carry = (
        jnp.zeros((block_m, parts[0].padded), jnp.float32),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    acc_ML, max_M, sum_M = lax.fori_loop(begin, end, body, carry)
    safe_sum_M = jnp.where(sum_M == 0, 1.0, sum_M)
    out_ML = acc_ML / safe_sum_M[:, None]
    if num_splits == 1:
        parts[0].store(out_ref, (row, line_M[:, None]), line_M < num_lines, out_ML.astype(out_ref.dtype))
        return
    parts[0].store(out_ref, (split, row, line_M[:, None]), line_M < num_lines, out_ML)
    lse_M = jnp.where(sum_M == 0, MASKED, max_M + jnp.log2(safe_sum_M))
    (lse_ref,) = lse_refs
    store(lse_ref.at[split, row, line_M], lse_M, mask=line_M < num_lines)


@dataclass(frozen=True)
class Part:
    """A range of the last dimension of an array, filled up to a power of two."""

    start: int
    size: int
    padded: int

    @staticmethod
    def of(start: int, stop: int) -> "Part":
        return Part(start, stop - start, max(16, next_power_of_two(stop - start)))

    def load(self, ref, before: tuple, mask_M: jax.Array | None) -> jax.Array:
        """[M, padded] of the rows that `before` names; 0 where the mask is False. None: all rows."""
        dim = self._dim()
        mask = self._mask(mask_M)
        return load(ref.at[(*before, dim[None, :])], mask=mask, other=None if mask is None else 0.0)

    def store(self, ref, before: tuple, mask_M: jax.Array, x: jax.Array) -> None:
        store(ref.at[(*before, self._dim()[None, :])], x, mask=self._mask(mask_M))

    def _dim(self) -> jax.Array:
        return self.start + jnp.arange(self.padded)

    def _mask(self, mask_M: jax.Array | None) -> jax.Array | None:
        in_part_1D = None if self.size == self.padded else (jnp.arange(self.padded) < self.size)[None, :]
        if mask_M is None:
            return in_part_1D
        mask = mask_M[:, None] if in_part_1D is None else mask_M[:, None] & in_part_1D
        return jnp.broadcast_to(mask, (mask_M.shape[0], self.padded))


def _combine_kernel(partial_ref, lse_ref, out_ref) -> None:
    """The splits of one query head, weighted by their share of the softmax sum; a split without keys has weight 0."""
    num_splits, _, _, latent_dim = partial_ref.shape
    head, row = pl.program_id(0), pl.program_id(1)
    split_s = jnp.arange(max(2, next_power_of_two(num_splits)))
    part = Part.of(0, latent_dim)
    lse_s = load(lse_ref.at[split_s, row, head], mask=split_s < num_splits, other=MASKED)
    weight_s = jnp.exp2(lse_s - lse_s.max(axis=0))
    partial_sL = part.load(partial_ref, (split_s[:, None], row, head), split_s < num_splits)
    out_L = (partial_sL * weight_s[:, None]).sum(axis=0) / weight_s.sum(axis=0)
    dim_L = jnp.arange(part.padded)
    store(out_ref.at[row, head, dim_L], out_L.astype(out_ref.dtype), mask=dim_L < latent_dim)
