"""Latent decode attention for Pallas Mosaic GPU (Hopper): one query token per row, one even share of all keys per worker.

    rows       |----------- row 0 -----------|- row 1 -|------------------ row 2 ------------------|   in tiles of 64 keys
    workers    [---- 0 ----][---- 1 ----][---- 2 ----][---- 3 ----][---- 4 ----][---- 5 ----][ 6 -]   (stream-K, Osama et al. 2023)

A worker is a CTA, one for each core. The plan of the work is `paged_attention.mosaic_plan` with one KV head.

    producer warpgroup   page table -> TMA copies of whole pages -> ring of tiles in shared memory, across items
    compute warpgroup    S^T[k, n] = C[k, L + E] q^T[L + E, n];   online softmax in base 2;   O^T[L, n] += C^T[L, k] P^T[k, n]

Keys are the M of the products and the query heads, filled up to a multiple of 8, their N. A tile is loaded once, and is key and value.
Everything is written in float32, whole rows to their place and parts of rows to a buffer; a second kernel merges the parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_copies
from pallas_kernels._compat import add_wgmma, load, load_smem, mosaic_interpret, num_cores, store, triton_call
from pallas_kernels.paged_attention import mosaic_decode as paged
from pallas_kernels.paged_attention.mosaic_consumer import CHUNK, LAYOUT, LOG2E, MASKED, store_transposed
from pallas_kernels.paged_attention.mosaic_plan import DecodeTiles, Item, Plan, make_plan, walk
from pallas_kernels.paged_attention.queries import in_parts
from pallas_kernels.row_copies import Rows

SMEM_BYTES = 227 * 1024
"""Of a CTA."""
MAX_HEADS = 32
"""What the registers of a warpgroup hold the sum of."""
PAGE_SIZES = paged.PAGE_SIZES
BLOCK_K = 64
PART_TILE = (8, 32)
"""Of the results in shared memory: a row of a tile is 128 bytes."""


def num_stages(num_heads: int, width: int, latent_dim: int) -> int:
    """Tiles of keys that shared memory has room for beside the rest."""
    padded_heads = -(-num_heads // 8) * 8
    fixed = (
        padded_heads * (2 * 2 * width + 2 * BLOCK_K + 4 * latent_dim) + 2048
    )  # queries, weights, results; barriers, reductions
    return min(4, (SMEM_BYTES - fixed) // (2 * BLOCK_K * width))


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
    num_workers: int | None = None,
) -> jax.Array:
    """num_workers: CTAs, for tests; by default as many as the device holds at once."""
    if num_queries > 1:
        options: dict[str, Any] = {"num_queries": num_queries, "scale": scale, "interpret": interpret}
        return in_parts(latent_decode, 1, (q_RNL, q_RNE), (pages_P1SC,), page_table_RB, kv_length_R, **options)
    num_rows, num_heads, latent_dim = q_RNL.shape
    tiles = DecodeTiles(BLOCK_K, num_stages(num_heads, pages_P1SC.shape[3], latent_dim), ctas_per_core=1)
    plan = make_plan(kv_length_R, 1, tiles, None, num_workers or num_cores())
    padding = -num_heads % 8
    queries = tuple(jnp.pad(q, ((0, 0), (0, padding), (0, 0))) if padding else q for q in (q_RNL, q_RNE))
    parts = _items(queries, pages_P1SC, page_table_RB, plan, tiles, score_scale=scale * LOG2E, interpret=interpret)
    return triton_call(
        _combine_kernel,
        name="latent_decode_combine",
        grid=(num_heads, num_rows),
        out_shape=jax.ShapeDtypeStruct(q_RNL.shape, q_RNL.dtype),
        num_warps=2,
        num_stages=1,
        interpret=interpret,
    )(*parts, plan.workers_RK2)


def _items(
    queries: tuple[jax.Array, ...],
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    plan: Plan,
    tiles: DecodeTiles,
    *,
    score_scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The main kernel -> the results of whole rows, parts of rows, and the softmax sums of these. Heads are a multiple of 8."""
    q_RNL, q_RNE = queries
    num_rows, num_heads, latent_dim = q_RNL.shape
    rotated_dim = q_RNE.shape[2]
    num_workers, dtype, block_k = plan.work_W6.shape[0], q_RNL.dtype, tiles.block_k
    copies = 2 * (block_k // min(pages_P1SC.shape[2], block_k))
    shared = functools.partial(paged._swizzled, dtype=dtype)
    tilings = (plgpu.TilingTransform(PART_TILE), plgpu.SwizzleTransform(PART_TILE[1] * 4))
    return plgpu.kernel(
        functools.partial(_decode_kernel, score_scale=score_scale, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, num_heads, latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_workers, num_heads, latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_workers, num_heads), jnp.float32),
        ),
        grid=(num_workers,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            {
                "q": shared((2, num_heads, latent_dim)),
                "q_rotated": shared((2, num_heads, rotated_dim)),
                "latent": shared((tiles.num_stages, block_k, latent_dim)),
                "rotated": shared((tiles.num_stages, block_k, rotated_dim)),
                "p": shared((num_heads, block_k)),
                "out": plgpu.SMEM((num_heads, latent_dim), jnp.float32, transforms=tilings),
                "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
                "q_free": plgpu.Barrier(num_barriers=2),
                "full": plgpu.Barrier(num_arrivals=copies, num_barriers=tiles.num_stages),
                "free": plgpu.Barrier(num_barriers=tiles.num_stages),
            },
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=mosaic_interpret(interpret),
    )(q_RNL.reshape(-1, latent_dim), q_RNE.reshape(-1, rotated_dim), pages_P1SC, page_table_RB, plan.rows_A2, plan.work_W6)


def _decode_kernel(
    q_ref,  # [R * N, L]
    q_rotated_ref,  # [R * N, E]
    pages_ref,  # [P, 1, S, C]
    table_ref,  # [R, B]
    rows_ref,  # [R + 1, 2]
    work_ref,  # [W, 6]
    whole_ref,  # [R, N, L] float32; only whole rows are written
    partial_ref,  # [2 W, N, L] float32: of the item that begins a row in place 2 w + 1, of the one that goes on in place 2 w
    lse_ref,  # [2 W, N] float32, base 2
    smem,
    *,
    score_scale: float,
    interpret: bool,
) -> None:
    num_slots, block_k, _ = smem["latent"].shape
    walk_items = functools.partial(walk, rows_ref=rows_ref, work_ref=work_ref, num_kv_heads=1, block_k=block_k, window=None)
    start = (jnp.int32(0), jnp.int32(0))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _compute():
        refs = {"whole_ref": whole_ref, "partial_ref": partial_ref, "lse_ref": lse_ref}
        walk_items(functools.partial(_attend, **refs, smem=smem, score_scale=score_scale, interpret=interpret), start)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 1)
    def _produce():
        visit = functools.partial(_fetch, q_refs=(q_ref, q_rotated_ref), pages_ref=pages_ref, table_ref=table_ref, smem=smem)
        num_items, num_tiles = walk_items(visit, start)
        # A completion that nobody waited for would be taken for a later one.
        paged._drain(num_items, 2, smem["q_free"])
        paged._drain(num_tiles, num_slots, smem["free"])


def _fetch(item: Item, carry, *, q_refs, pages_ref, table_ref, smem):
    """The producer's part of an item: its queries and its tiles into the rings, as soon as there is room."""
    num_items, num_tiles = carry
    num_heads, latent_dim = smem["q"].shape[1:]
    num_slots, block_k, rotated_dim = smem["rotated"].shape
    page_size = pages_ref.shape[2]
    copy_rows = min(page_size, block_k)
    copies = block_k // copy_rows

    slot = lax.rem(num_items, jnp.int32(2))
    pl.when(num_items >= 2)(functools.partial(plgpu.barrier_wait, smem["q_free"].at[slot]))
    for name, q_ref in zip(("q", "q_rotated"), q_refs, strict=True):
        row_copies.load(q_ref, Rows(item.row, num_heads, num_heads), smem[name].at[slot], smem["q_full"].at[slot])

    last_page = lax.div(item.length - 1, jnp.int32(page_size))

    def page_ids(index):
        first = lax.div((item.tile + index) * block_k, jnp.int32(page_size))
        # Past the row's pages the last one is read again, from L2.
        return tuple(table_ref[item.row, jnp.minimum(first + copy, last_page)] for copy in range(copies))

    def body(index, pages):
        next_pages = page_ids(index + 1)  # one tile ahead: the copies below must not wait for the table
        number = num_tiles + index
        stage = lax.rem(number, jnp.int32(num_slots))
        in_page = lax.rem(item.tile + index, jnp.int32(page_size // block_k)) if page_size > block_k else 0
        pl.when(number >= num_slots)(functools.partial(plgpu.barrier_wait, smem["free"].at[stage]))
        for name, part in (("rotated", pl.ds(latent_dim, rotated_dim)), ("latent", pl.ds(0, latent_dim))):
            for copy, page in enumerate(pages):
                target = smem[name].at[stage, pl.ds(copy * copy_rows, copy_rows)]
                rows = Rows(in_page, copy_rows, copy_rows)
                row_copies.load(pages_ref, rows, target, smem["full"].at[stage], before=(page, 0), after=(part,))
        return next_pages

    lax.fori_loop(0, item.num_tiles, body, page_ids(0))
    return num_items + 1, num_tiles + item.num_tiles


def _attend(item: Item, carry, *, whole_ref, partial_ref, lse_ref, smem, score_scale: float, interpret: bool):
    """The consumer's part of an item: attention of its queries over its tiles."""
    num_items, num_tiles = carry
    num_heads, latent_dim = smem["q"].shape[1:]
    num_slots, block_k, _ = smem["latent"].shape
    slot = lax.rem(num_items, jnp.int32(2))
    q_ref, q_rotated_ref = smem["q"].at[slot], smem["q_rotated"].at[slot]

    def body(index, state):
        acc_LN, max_N, sum_kN = state
        stage = lax.rem(num_tiles + index, jnp.int32(num_slots))
        start = (item.tile + index) * block_k
        latent_ref = smem["latent"].at[stage]
        plgpu.barrier_wait(smem["full"].at[stage])

        def score(acc_ref):
            plgpu.wgmma(acc_ref, smem["rotated"].at[stage], q_rotated_ref.transpose((1, 0)))
            plgpu.wgmma(acc_ref, latent_ref, q_ref.transpose((1, 0)))
            return acc_ref[...]

        scores_kN = pl.run_scoped(score, plgpu.ACC((block_k, num_heads), jnp.float32)) * score_scale
        position_kN = start + plgpu.broadcasted_iota(jnp.int32, scores_kN.shape, 0, layout=LAYOUT)
        scores_kN = jnp.where(position_kN < item.length, scores_kN, MASKED)
        new_max_N = jnp.maximum(max_N, scores_kN.max(axis=0))
        weights_kN = jnp.exp2(scores_kN - lax.broadcast_in_dim(new_max_N, scores_kN.shape, [1]))
        shrink_N = jnp.exp2(max_N - new_max_N)
        sum_kN = sum_kN * lax.broadcast_in_dim(shrink_N, sum_kN.shape, [1]) + weights_kN
        acc_LN = acc_LN * lax.broadcast_in_dim(shrink_N, acc_LN.shape, [1])
        store_transposed(smem["p"], weights_kN.astype(smem["p"].dtype))

        @pl.when(start + block_k > item.length)
        def _clear_hidden_values():
            # What lies there may be NaN, which a weight of zero would not remove.
            position_kc = start + plgpu.broadcasted_iota(jnp.int32, (block_k, CHUNK), 0, layout=LAYOUT)
            for column in range(0, latent_dim, CHUNK):
                chunk_ref = latent_ref.at[:, pl.ds(column, CHUNK)]
                latent_kc = load_smem(chunk_ref, LAYOUT)
                chunk_ref[...] = jnp.where(position_kc < item.length, latent_kc, jnp.zeros_like(latent_kc))

        plgpu.commit_smem()
        acc_LN = add_wgmma(acc_LN, latent_ref.transpose((1, 0)), smem["p"].transpose((1, 0)), interpret=interpret)
        plgpu.barrier_arrive(smem["free"].at[stage])
        return acc_LN, new_max_N, sum_kN

    plgpu.barrier_wait(smem["q_full"].at[slot])
    state = (
        plgpu.layout_cast(jnp.zeros((latent_dim, num_heads), jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((num_heads,), MASKED, jnp.float32), LAYOUT.reduce(0)),
        plgpu.layout_cast(jnp.zeros((block_k, num_heads), jnp.float32), LAYOUT),
    )
    acc_LN, max_N, sum_kN = lax.fori_loop(0, item.num_tiles, body, state)
    plgpu.barrier_arrive(smem["q_free"].at[slot])
    sum_N = sum_kN.sum(axis=0)
    acc_LN = acc_LN * lax.broadcast_in_dim(1.0 / sum_N, acc_LN.shape, [1])

    is_whole, heads = item.is_first & item.is_last, Rows(0, num_heads, num_heads)
    part = 2 * lax.axis_index("cta") + item.is_first.astype(jnp.int32)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffer still holds what the item before stores
    store_transposed(smem["out"], acc_LN)
    plgpu.commit_smem()

    @pl.when(is_whole)
    def _store_whole():
        row_copies.store(smem["out"], whole_ref, heads, before=(item.row,))

    @pl.when(jnp.logical_not(is_whole))
    def _store_part():
        row_copies.store(smem["out"], partial_ref, heads, before=(part,))
        lse_ref.at[part][...] = max_N + jnp.log2(sum_N)

    return num_items + 1, num_tiles + item.num_tiles


def _combine_kernel(whole_ref, partial_ref, lse_ref, workers_ref, out_ref) -> None:
    """One query head of a row: as it is, or from its parts, weighted by their share of the softmax sum; zeros without keys."""
    latent_dim = partial_ref.shape[2]
    head, row = pl.program_id(0), pl.program_id(1)
    first, last = workers_ref[row, 0, 0], workers_ref[row, 0, 1]
    dim_L = jnp.arange(latent_dim)
    num_parts = 8  # read at once

    def body(chunk, state):
        acc_L, max_, sum_ = state
        index_c = chunk * num_parts + jnp.arange(num_parts)
        exists_c = first + index_c <= last
        part_c = 2 * (first + index_c) + (index_c == 0).astype(jnp.int32)
        lse_c = load(lse_ref.at[part_c, head], mask=exists_c, other=MASKED)
        part_cL = load(partial_ref.at[part_c[:, None], head, dim_L[None, :]], mask=exists_c[:, None], other=0.0)
        new_max = jnp.maximum(max_, lse_c.max(axis=0))
        weight_c = jnp.where(exists_c, jnp.exp2(lse_c - new_max), 0.0)
        shrink = jnp.exp2(max_ - new_max)
        return acc_L * shrink + (part_cL * weight_c[:, None]).sum(axis=0), new_max, sum_ * shrink + weight_c.sum(axis=0)

    @pl.when(first == last)
    def _whole():
        store(out_ref.at[row, head, dim_L], load(whole_ref.at[row, head, dim_L]).astype(out_ref.dtype))

    @pl.when(first != last)
    def _merged():
        state = (jnp.zeros((latent_dim,), jnp.float32), jnp.float32(MASKED), jnp.float32(0))
        acc_L, _, sum_ = lax.fori_loop(0, lax.div(last - first + num_parts, num_parts), body, state)
        store(out_ref.at[row, head, dim_L], (acc_L / jnp.where(sum_ == 0, 1.0, sum_)).astype(out_ref.dtype))
