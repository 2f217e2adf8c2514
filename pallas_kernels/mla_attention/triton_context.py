"""Attention of prompts over the keys in the cache before their tokens of a step, over latents, for Pallas-Triton.

It adds to what `triton_local` computed: the results over a row's own tokens are read, merged with those over its context, weighted
by their shares of the softmax sum, and written back. A step whose rows have no context costs it a launch.

A program stays for the whole launch and walks through items, each a tile of block_m tokens of one head:

    q[M, L] = q[M, P] W_k[P, L]     chunks of P
    attention over the row's latents in tiles of block_k tokens, gathered through the page table, as in `triton_decode`
    out[M, V] = sum[M, L] W_v^T[L, V]     chunks of V, each merged with what is there
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import dot_f32, load, num_cores, store, triton_call
from pallas_kernels.mla_attention.items import CONTEXT, NUM_TOKENS, OWNER, TOKEN, make_items
from pallas_kernels.mla_attention.triton_decode import Part
from pallas_kernels.paged_attention.triton_decode import LOG2E, MASKED, compute_type


@dataclass(frozen=True)
class ContextTiles:
    """Sizes of the kernel: queries and keys of a tile, and values of a head that are multiplied with a weight at once."""

    block_m: int = 64
    block_k: int = 32
    chunk: int = 32
    num_warps: int = 8
    num_stages: int = 2


def pick_tiles(itemsize: int) -> ContextTiles:
    """Sizes for a type."""
    # Full float32 products run without tensor cores and hold their operands in registers.
    return ContextTiles() if itemsize <= 2 else ContextTiles(block_m=16, block_k=16, chunk=16, num_warps=8, num_stages=1)


def add_context(
    out_TNV: jax.Array,
    lse_TN: jax.Array,
    q_TNP: jax.Array,
    q_TNE: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    key_NPL: jax.Array,
    value_NVL: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
    tiles: ContextTiles | None = None,
    min_tokens: int = 1,
) -> jax.Array:
    """out_TNV with the context added, in place where XLA can. lse_TN: of the softmax sums of out_TNV, base 2.

    Rows of fewer than min_tokens tokens are left as they are.
    """
    num_tokens, num_heads, _ = out_TNV.shape
    tiles = tiles or pick_tiles(compute_type(q_TNP.dtype, pages_P1SC.dtype).itemsize)
    items_N5, count_1 = make_items(query_start_R1, kv_length_R, num_tokens, tiles.block_m, min_tokens=min_tokens, context=True)
    num_programs = min(2 if interpret else num_cores(), num_heads * items_N5.shape[0])
    return triton_call(
        functools.partial(_kernel, tiles=tiles, num_programs=num_programs, score_scale=scale * LOG2E),
        name="latent_attention_context",
        grid=(num_programs,),
        out_shape=jax.ShapeDtypeStruct(out_TNV.shape, out_TNV.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
        input_output_aliases={0: 0},
    )(out_TNV, lse_TN, q_TNP, q_TNE, pages_P1SC, page_table_RB, items_N5, count_1, key_NPL, value_NVL)


def _kernel(
    _out_ref,
    lse_ref,  # [T, N]
    q_ref,  # [T, N, P]
    q_rotated_ref,  # [T, N, E]
    pages_ref,  # [P, 1, S, C]
    page_table_ref,  # [R, B]
    items_ref,  # [items, 5]
    count_ref,  # [1]
    key_ref,  # [N, P, L]
    value_ref,  # [N, V, L]
    out_ref,  # [T, N, V]
    *,
    tiles: ContextTiles,
    num_programs: int,
    score_scale: float,
) -> None:
    num_heads, plain_dim, latent_dim = key_ref.shape
    value_dim, block_m, chunk = value_ref.shape[1], tiles.block_m, tiles.chunk
    dtype = compute_type(q_ref.dtype, pages_ref.dtype)
    latent = Part.of(0, latent_dim)
    chunk_c = jnp.arange(chunk)

    def do_item(index, _):
        # All heads of a tile one after the other: they read the same keys.
        item, head = lax.div(index, num_heads), lax.rem(index, num_heads)
        token, count = items_ref[item, TOKEN], items_ref[item, NUM_TOKENS]
        line_M = jnp.arange(block_m)
        is_used_M, token_M = line_M < count, token + line_M

        def absorb(number, q_ML):
            dim_c = number * chunk + chunk_c
            in_head_c = dim_c < plain_dim
            mask_Mc = is_used_M[:, None] & in_head_c[None, :]
            q_Mc = load(q_ref.at[token_M[:, None], head, dim_c[None, :]], mask=mask_Mc, other=0.0)
            key_cL = latent.load(key_ref, (head, dim_c[:, None]), in_head_c)
            return q_ML + dot_f32(q_Mc, key_cL)

        q_ML = jnp.zeros((block_m, latent.padded), jnp.float32)
        q_ML = lax.fori_loop(0, -(-plain_dim // chunk), absorb, q_ML).astype(dtype)
        q_ME = Part.of(0, q_rotated_ref.shape[-1]).load(q_rotated_ref, (token_M[:, None], head), is_used_M).astype(dtype)
        row, length = items_ref[item, OWNER], items_ref[item, CONTEXT]
        acc_ML, max_M, sum_M = _attend(
            q_ML, q_ME, pages_ref, page_table_ref, row, length, latent, dtype, tiles.block_k, score_scale
        )

        lse_M = load(lse_ref.at[token_M, head], mask=is_used_M, other=0.0)
        context_lse_M = max_M + jnp.log2(sum_M)
        top_M = jnp.maximum(lse_M, context_lse_M)
        own_M, context_M = jnp.exp2(lse_M - top_M), jnp.exp2(context_lse_M - top_M)
        total_M = own_M + context_M
        # Rounded as a result over latents is.
        sum_ML = (acc_ML / sum_M[:, None]).astype(value_ref.dtype)
        own_M, context_M = own_M / total_M, context_M / total_M

        def merge(number, _):
            dim_c = number * chunk + chunk_c
            in_head_c = dim_c < value_dim
            mask_Mc = is_used_M[:, None] & in_head_c[None, :]
            value_cL = latent.load(value_ref, (head, dim_c[:, None]), in_head_c)
            place = out_ref.at[token_M[:, None], head, dim_c[None, :]]
            own_Mc = load(place, mask=mask_Mc, other=0.0).astype(jnp.float32)
            merged_Mc = own_Mc * own_M[:, None] + dot_f32(sum_ML, value_cL.T) * context_M[:, None]
            store(place, merged_Mc.astype(out_ref.dtype), mask=mask_Mc)

        lax.fori_loop(0, -(-value_dim // chunk), merge, None)

    start = pl.program_id(0)
    num_items = count_ref[0] * num_heads
    rounds = lax.div(jnp.maximum(num_items - start, 0) + (num_programs - 1), num_programs)
    lax.fori_loop(0, rounds, lambda i, _: do_item(start + i * num_programs, _), None)


def _attend(
    q_ML: jax.Array,
    q_ME: jax.Array,
    pages_ref,
    page_table_ref,
    row: jax.Array,
    length: jax.Array,
    latent: Part,
    dtype: jnp.dtype,
    block_k: int,
    score_scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of latents, maxima and sums of weights over the first `length` > 0 keys of a row, which all queries see."""
    block_m, width = q_ML.shape[0], pages_ref.shape[3]
    page_size, table_width = pages_ref.shape[2], page_table_ref.shape[1]
    rotated = Part.of(latent.size, width)

    def body(index, carry, *, masked: bool):
        acc_ML, max_M, sum_M = carry
        position_k = index * block_k + jnp.arange(block_k)
        page_index_k = lax.div(position_k, page_size)
        if masked and (table_width * page_size) % block_k:
            page_index_k = jnp.minimum(page_index_k, table_width - 1)
        page_k1 = load(page_table_ref.at[row, page_index_k])[:, None]
        offset_k1 = lax.rem(position_k, page_size)[:, None]
        # Lanes past the last key load nothing and give 0: what lies there may be NaN.
        is_read_k = position_k < length if masked else None
        latent_kL, rotated_kE = (
            part.load(pages_ref, (page_k1, 0, offset_k1), is_read_k).astype(dtype) for part in (latent, rotated)
        )
        scores_Mk = (dot_f32(q_ML, latent_kL.T) + dot_f32(q_ME, rotated_kE.T)) * score_scale
        if masked:
            scores_Mk = jnp.where(position_k[None, :] < length, scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
        weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
        shrink_M = jnp.exp2(max_M - new_max_M)
        acc_ML = acc_ML * shrink_M[:, None] + dot_f32(weights_Mk.astype(dtype), latent_kL)
        return acc_ML, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

    carry = (
        jnp.zeros((block_m, latent.padded), jnp.float32),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    whole, end = lax.div(length, block_k), lax.div(length + (block_k - 1), block_k)
    carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
    return lax.fori_loop(whole, end, functools.partial(body, masked=True), carry)
