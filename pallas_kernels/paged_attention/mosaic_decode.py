"""Paged decode attention for Pallas Mosaic GPU (Hopper): one query token per row, one even share of all keys per worker.

    rows x heads   |-- row 0, head 0 --|-- row 0, head 1 --|- row 1, head 0 -|- row 1, head 1 -|   in tiles of block_k keys
    workers        [---- 0 ----][---- 1 ----][---- 2 ----][---- 3 ----][---- 4 ----][--- 5 ---]   (stream-K, Osama et al. 2023)

A worker is two warpgroups, in a CTA of their own or with other workers (`cta_workers`). Its range cuts into items, each (part of) one row
and head. A whole one is written to the result; a part goes to a buffer, and a second kernel merges the parts by their softmax sums
(split-KV as in Flash-Decoding, Dao et al. 2023).

    producer warpgroup   page table -> TMA copies of whole pages -> ring of num_stages tiles in shared memory, across items
    compute warpgroup    S^T[k, n] = K[k, H] q^T[H, n];   online softmax in base 2;   O^T[H, n] += V^T[H, k] P^T[k, n]

Keys are the M of the products and the G query heads of a KV head, filled up to a multiple of 8, their N: no work is spent on 64
rows of queries that are not there. Two workers share a core, so that one computes while the other waits.
Of W queries a row, N are the W * G query heads that share its keys; each query has its own last key.
Over a float8_e4m3fn cache a warp reads tiles from shared memory straight into registers, as float16 operands of K and V^T (`eight_bits`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import row_copies
from pallas_kernels._compat import (
    load,
    mosaic_interpret,
    num_cores,
    store,
    triton_call,
)
from pallas_kernels.paged_attention import cta_workers, eight_bits, mosaic_plan
from pallas_kernels.paged_attention.mosaic_consumer import CHUNK, LOG2E, MASKED, Consumer
from pallas_kernels.paged_attention.mosaic_plan import DecodeTiles, Item, Plan, make_plan
from pallas_kernels.paged_attention.queries import in_parts
from pallas_kernels.row_copies import Rows

SMEM_BYTES = 228 * 1024  # of a core; a CTA takes 1 KB beside its own
MAX_SUMS = 8192
"""Sums that the registers of a warpgroup hold: query heads of all queries times their width."""
PAGE_SIZES = (8, 16, 32, 64, 128)
TILE_ROWS = 8  # of the swizzled tiles in shared memory
_NARROW_BYTES = 96 << 10
"""Of an 8-bit cache in flight, of a core: twice as many were slower on an H100, 66 us in place of 59 over 64 rows of 1152 keys."""


THREE_WORKERS = DecodeTiles(num_stages=2, ctas_per_core=1, workers_per_cta=3)


def takes_three_workers(num_rows: int, num_groups: int, head_dim: int, cache_itemsize: int, num_queries: int = 1) -> bool:
    """Whether `THREE_WORKERS` were measured faster than two CTAs of a core: over an 8-bit cache on an H200, whose bandwidth two do not
    use up. µs with rows of 1152 keys, in brackets two CTAs: 256 rows 171 (202), 64 rows 54.8 (60.1), 8 rows 20.9 (20.8), one 13.8 (11.9).
    """
    is_measured = cache_itemsize == 1 and head_dim == 128 and num_queries * num_groups <= 8
    return is_measured and num_rows > 8 and device_kind().startswith("NVIDIA H200")


def device_kind() -> str:
    """Name of the kind of GPU that is compiled for, as JAX has it; empty without a GPU."""
    try:
        device = jax.local_devices()[0]
    except RuntimeError:
        return ""
    return str(device.device_kind) if device.platform == "gpu" else ""


def pick_tiles(num_groups: int, head_dim: int, cache_itemsize: int, num_queries: int = 1, num_rows: int = 1) -> DecodeTiles:
    """Three workers where they were measured faster. Else two CTAs per core if each has room for three tiles and 128 registers suffice,
    else one; as many tiles as there is room for."""
    if takes_three_workers(num_rows, num_groups, head_dim, cache_itemsize, num_queries):
        return THREE_WORKERS
    block_k, padded_lines = 64, -(-num_queries * num_groups // 8) * 8
    fixed = padded_lines * (10 * head_dim + 2 * block_k) + 4096  # queries, weights, results; barriers and reductions
    if cache_itemsize == 1 or num_queries > 1:
        fixed += 2 * head_dim * padded_lines  # the queries, widened or in tiles
    tile = 2 * block_k * head_dim * cache_itemsize
    stages = {ctas: (SMEM_BYTES // ctas - fixed - 1024) // tile for ctas in (1, 2)}
    ctas = 2 if stages[2] >= 3 and padded_lines * head_dim < 2048 else 1
    most = max(2, _NARROW_BYTES // ctas // tile) if cache_itemsize == 1 else 8
    return DecodeTiles(block_k=block_k, num_stages=min(stages[ctas], most), ctas_per_core=ctas)


def most_queries(num_groups: int, head_dim: int, cache_itemsize: int, wanted: int) -> int:
    """The most queries of a row, up to as many as are wanted, for which there are registers and shared memory; at least one."""

    def fit(num_queries: int) -> bool:
        padded_lines = -(-num_queries * num_groups // 8) * 8
        return (
            padded_lines * head_dim <= MAX_SUMS
            and pick_tiles(num_groups, head_dim, cache_itemsize, num_queries).num_stages >= 2
        )

    return max((count for count in range(2, wanted + 1) if fit(count)), default=1)


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
    interpret: bool = False,
    tiles: DecodeTiles | None = None,
    num_workers: int | None = None,
) -> jax.Array:
    """num_workers: a multiple of `tiles.workers_per_cta`, for tests; by default as many as the device holds at once.

    With a float8_e4m3fn cache the products are of float16, which holds every such number (and queries up to 65504); NaN that is stored
    counts as ±480.
    """
    _, num_kv_heads, num_groups, head_dim = q_RKGH.shape
    page_size = k_pages_PKSH.shape[2]
    cache_types = {k_pages_PKSH.dtype, v_pages_PKSH.dtype}
    if cache_types not in ({q_RKGH.dtype}, {jnp.dtype(jnp.float8_e4m3fn)}):
        raise ValueError(
            f"the Mosaic decode kernel takes a cache of the queries' type or of float8_e4m3fn, got {q_RKGH.dtype} queries and "
            f"{k_pages_PKSH.dtype}, {v_pages_PKSH.dtype} caches; convert the queries or use 'xla'"
        )
    if page_size not in PAGE_SIZES:
        raise ValueError(f"the Mosaic decode kernel takes pages of {PAGE_SIZES} tokens, got {page_size}; use 'xla'")
    cache_itemsize = k_pages_PKSH.dtype.itemsize
    most = most_queries(num_groups, head_dim, cache_itemsize, num_queries)
    if num_queries > most:
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        options |= {"sinks_KG": sinks_KG, "num_queries": num_queries}
        options |= {"interpret": interpret, "tiles": tiles, "num_workers": num_workers}
        pages = (k_pages_PKSH, v_pages_PKSH)
        return in_parts(paged_decode, most, (q_RKGH,), pages, page_table_RB, kv_length_R, **options)
    if tiles is None:
        tiles = pick_tiles(num_groups, head_dim, cache_itemsize, num_queries, len(kv_length_R))
    if num_workers is None:
        num_workers = num_cores() * tiles.ctas_per_core * tiles.workers_per_cta
    assert num_workers % tiles.workers_per_cta == 0, "a worker of the plan would not run"
    span = None if window is None else window + num_queries - 1
    plan = make_plan(kv_length_R, num_kv_heads, tiles, span, num_workers)
    whole_RKGH, partial_CGH, lse_CN = decode_items(
        q_RKGH,
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        plan,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks_KG=sinks_KG,
        num_queries=num_queries,
        interpret=interpret,
        tiles=tiles,
    )
    return combine_items(whole_RKGH, partial_CGH, lse_CN, plan, sinks_KG, interpret=interpret)


def decode_items(
    q_RKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    plan: Plan,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks_KG: jax.Array | None = None,
    num_queries: int = 1,
    interpret: bool,
    tiles: DecodeTiles,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The main kernel -> the result where a worker saw a whole row and head, the parts of the others, and their softmax sums."""
    num_tokens, num_kv_heads, num_groups, head_dim = q_RKGH.shape
    num_workers, num_lines = plan.work_W6.shape[0], num_queries * num_groups
    padded_lines = -(-num_lines // 8) * 8
    if num_queries == 1 and TILE_ROWS % num_groups:
        # Queries of a KV head are loaded as whole tiles of rows, or lie in one: see `row_copies`.
        q_RKGH = jnp.pad(q_RKGH, ((0, 0), (0, 0), (0, padded_lines - num_groups), (0, 0)))
    q_QH = q_RKGH.reshape(-1, head_dim)
    # The array has whole tiles, as many as a copy at least.
    padding = max(-(-q_QH.shape[0] // TILE_ROWS) * TILE_ROWS, padded_lines) - q_QH.shape[0]
    if num_queries == 1 and padding:
        q_QH = jnp.pad(q_QH, ((0, padding), (0, 0)))
    sinks: tuple[jax.Array, ...] = ()
    if sinks_KG is not None:
        sinks_KN = sinks_KG if num_queries == 1 else jnp.tile(sinks_KG, (1, num_queries))
        sinks = (jnp.pad(sinks_KN, ((0, 0), (0, padded_lines - num_lines))),)
    kernel = functools.partial(
        _decode_kernel,
        has_sinks=bool(sinks),
        num_kv_heads=num_kv_heads,
        num_groups=num_groups,
        num_queries=num_queries,
        block_k=tiles.block_k,
        num_stages=tiles.num_stages,
        workers_per_cta=tiles.workers_per_cta,
        score_scale=scale * LOG2E,
        soft_cap=None if soft_cap is None else soft_cap * LOG2E,
        window=window,
        interpret=interpret,
    )
    scales = [jnp.asarray(1.0 if x is None else x, jnp.float32).reshape(1) for x in (k_scale, v_scale)]
    dtype, cache_dtype, page_size = q_RKGH.dtype, k_pages_PKSH.dtype, k_pages_PKSH.shape[2]
    is_narrow = cache_dtype != dtype
    compute_dtype = eight_bits.WIDE if is_narrow else dtype
    copied = {}  # operands of the products that are not as they were loaded
    if is_narrow and interpret:
        copied["wide"] = _swizzled((tiles.block_k, head_dim), compute_dtype)
    if is_narrow or num_queries > 1:
        copied["wide_q"] = _swizzled((padded_lines, head_dim), compute_dtype)
    q_shape = (2, padded_lines, head_dim)
    copies = tiles.block_k // min(page_size, tiles.block_k)
    ring = (tiles.num_stages, tiles.block_k, head_dim)
    pages = (
        plgpu.SMEM(ring, cache_dtype, transforms=eight_bits.transforms(head_dim)) if is_narrow else _swizzled(ring, cache_dtype)
    )
    scratch = {
        # Without tiles queries of several tokens come to lie one behind the other.
        "q": plgpu.SMEM(q_shape, dtype) if is_narrow or num_queries > 1 else _swizzled(q_shape, dtype),
        "k": pages,
        "v": pages,
        "p": _swizzled((padded_lines, tiles.block_k), compute_dtype),
        "out": plgpu.SMEM((padded_lines, head_dim), dtype),
        "partial": plgpu.SMEM((padded_lines, head_dim), jnp.float32),
        **copied,
    }
    barriers = {"q_full": (num_queries, 2), "q_free": (1, 2)}
    for name in ("k", "v"):
        barriers |= {f"{name}_full": (copies, tiles.num_stages), f"{name}_free": (1, tiles.num_stages)}
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, num_kv_heads, num_groups, head_dim), dtype),
            jax.ShapeDtypeStruct((2 * num_workers, num_lines, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_workers, padded_lines), jnp.float32),
        ),
        grid=(num_workers // tiles.workers_per_cta,),
        grid_names=("cta",),
        num_threads=2 * tiles.workers_per_cta,
        thread_name="warpgroup",
        scratch_types=(cta_workers.shared_memory(tiles.workers_per_cta, scratch, barriers),),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=mosaic_interpret(interpret),
    )(q_QH, k_pages_PKSH, v_pages_PKSH, page_table_RB, plan.rows_A2, plan.work_W6, *scales, *sinks)


def combine_items(
    whole_RKGH: jax.Array, partial_CGH: jax.Array, lse_CN: jax.Array, plan: Plan, sinks_KG: jax.Array | None, *, interpret: bool
) -> jax.Array:
    """The result, in the place of whole_RKGH: parts are merged, rows without keys become zeros."""
    num_rows, num_kv_heads, _ = plan.workers_RK2.shape
    num_lines = partial_CGH.shape[1]
    return triton_call(
        _combine_kernel,
        name="paged_decode_combine",
        grid=(num_kv_heads * num_lines, num_rows),
        out_shape=jax.ShapeDtypeStruct(whole_RKGH.shape, whole_RKGH.dtype),
        num_warps=2,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 0},
    )(whole_RKGH, partial_CGH, lse_CN, plan.workers_RK2, *(() if sinks_KG is None else (sinks_KG,)))


def _swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory in the form that the tensor cores read: tiles of 8 rows of 64 numbers."""
    transforms = (plgpu.TilingTransform((TILE_ROWS, CHUNK)), plgpu.SwizzleTransform(CHUNK * jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _decode_kernel(
    q_ref,  # [R * W * K * G, H]
    k_ref,  # [P, K, S, H]
    v_ref,  # [P, K, S, H]
    table_ref,  # [R, B]
    rows_ref,  # [R + 1, 2]
    work_ref,  # [W, 6]
    k_scale_ref,  # [1] float32
    v_scale_ref,  # [1] float32
    *refs,
    has_sinks: bool,
    num_kv_heads: int,
    num_groups: int,
    num_queries: int,
    block_k: int,
    num_stages: int,
    workers_per_cta: int,
    score_scale: float,
    soft_cap: float | None,
    window: int | None,
    interpret: bool,
) -> None:
    """refs: sinks [K, N] float32 if has_sinks; then

    out [R * W, K, G, H], of which only whole pairs are written;
    partial [2 workers, W * G, H] float32: of the item that begins a pair in place 2 w + 1, of the one that goes on in place 2 w;
    lse [2 workers, N] float32, base 2; shared memory by name.
    """
    sinks_ref, out_ref, partial_ref, lse_ref, smem = refs if has_sinks else (None, *refs)
    span = None if window is None else window + num_queries - 1
    find_worker = functools.partial(cta_workers.find, workers_per_cta)
    of_ring = {f"{name}_{side}": num_stages for name in ("k", "v") for side in ("full", "free")}
    smem = cta_workers.own_part(workers_per_cta, smem, {"q_full": 2, "q_free": 2} | of_ring)
    walk = functools.partial(
        mosaic_plan.walk,
        rows_ref=rows_ref,
        work_ref=work_ref,
        num_kv_heads=num_kv_heads,
        block_k=block_k,
        window=span,
        find_worker=find_worker,
    )
    unit = eight_bits.UNIT if jnp.dtype(k_ref.dtype).itemsize == 1 else 1.0
    registers = cta_workers.REGISTERS.get(workers_per_cta)
    role = cta_workers.role(workers_per_cta)

    @pl.when(role == 0)
    def _compute():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        consumer = Consumer(
            out_ref=out_ref,
            partial_ref=partial_ref,
            lse_ref=lse_ref,
            smem=smem,
            find_worker=find_worker,
            num_groups=num_groups,
            num_queries=num_queries,
            score_scale=score_scale * unit * k_scale_ref[0],
            value_scale=unit * v_scale_ref[0],
            sinks_ref=sinks_ref,
            soft_cap=soft_cap,
            window=window,
            interpret=interpret,
        )
        walk(consumer.attend, (jnp.int32(0), jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 1)
    def _produce():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        visit = functools.partial(
            _fetch,
            q_ref=q_ref,
            k_ref=k_ref,
            v_ref=v_ref,
            table_ref=table_ref,
            smem=smem,
            num_kv_heads=num_kv_heads,
            num_groups=num_groups,
            num_queries=num_queries,
        )
        num_items, num_tiles = walk(visit, (jnp.int32(0), jnp.int32(0)))
        # A completion that nobody waited for would be taken for a later one.
        _drain(num_items, 2, smem["q_free"])
        _drain(num_tiles, num_stages, smem["k_free"])
        _drain(num_tiles, num_stages, smem["v_free"])


def _drain(num_used: jax.Array, num_slots: int, free_barrier) -> None:
    def body(index, _):
        plgpu.barrier_wait(free_barrier.at[lax.rem(index, jnp.int32(num_slots))])

    lax.fori_loop(jnp.maximum(num_used - num_slots, 0), num_used, body, None)


def _fetch(item: Item, carry, *, q_ref, k_ref, v_ref, table_ref, smem, num_kv_heads: int, num_groups: int, num_queries: int):
    """The producer's part of an item: its queries and its tiles into the rings, as soon as there is room."""
    num_items, num_tiles = carry
    padded_lines = smem["q"].shape[1]
    num_stages, block_k, _ = smem["k"].shape
    page_size = k_ref.shape[2]
    copy_rows = min(page_size, block_k)
    copies = block_k // copy_rows

    slot = lax.rem(num_items, jnp.int32(2))
    pl.when(num_items >= 2)(functools.partial(plgpu.barrier_wait, smem["q_free"].at[slot]))
    # Rows past the group are queries of another, or zeros, or left over: columns of the products that are not kept.
    if num_queries == 1:
        unit = padded_lines if TILE_ROWS % num_groups else num_groups
        queries = Rows(item.row * num_kv_heads + item.head, unit, padded_lines, used=num_groups)
        row_copies.load(q_ref, queries, smem["q"].at[slot], smem["q_full"].at[slot])
    else:
        for query in range(num_queries):
            queries = Rows((item.row * num_queries + query) * num_kv_heads + item.head, num_groups, num_groups)
            row_copies.load(q_ref, queries, smem["q"].at[slot, pl.ds(query * num_groups, num_groups)], smem["q_full"].at[slot])

    last_page = lax.div(item.length - 1, jnp.int32(page_size))

    def page_ids(index):
        position = (item.tile + index) * block_k
        first = lax.div(position, jnp.int32(page_size))
        # Past the row's pages the last one is read again, from L2.
        return tuple(table_ref[item.row, jnp.minimum(first + copy, last_page)] for copy in range(copies))

    def body(index, pages):
        next_pages = page_ids(index + 1)  # one tile ahead: the copies below must not wait for the table
        number = num_tiles + index
        stage = lax.rem(number, jnp.int32(num_stages))
        part = lax.rem(item.tile + index, jnp.int32(page_size // block_k)) if page_size > block_k else 0
        for name, ref in (("k", k_ref), ("v", v_ref)):
            pl.when(number >= num_stages)(functools.partial(plgpu.barrier_wait, smem[name + "_free"].at[stage]))
            for copy, page in enumerate(pages):
                target = smem[name].at[stage, pl.ds(copy * copy_rows, copy_rows)]
                rows = Rows(part, copy_rows, copy_rows)
                row_copies.load(ref, rows, target, smem[name + "_full"].at[stage], before=(page, item.head))
        return next_pages

    lax.fori_loop(0, item.num_tiles, body, page_ids(0))
    return num_items + 1, num_tiles + item.num_tiles


def _combine_kernel(whole_ref, partial_ref, lse_ref, workers_ref, *refs) -> None:
    """The parts of one query head, weighted by their share of the softmax sum.

    refs: sinks [K, G] if there are any; out, which holds whole_ref already.
    """
    del whole_ref
    *sinks_refs, out_ref = refs
    num_lines, head_dim = partial_ref.shape[1:]
    num_groups = out_ref.shape[2]
    row = pl.program_id(1)
    head, line = lax.div(pl.program_id(0), num_lines), lax.rem(pl.program_id(0), num_lines)
    token, group = row, line
    if num_lines > num_groups:
        token, group = row * (num_lines // num_groups) + lax.div(line, num_groups), lax.rem(line, num_groups)
    first, last = workers_ref[row, head, 0], workers_ref[row, head, 1]
    dim_H = jnp.arange(head_dim)
    num_parts = 16  # read at once

    def body(chunk, state):
        acc_H, max_, sum_ = state
        index_c = chunk * num_parts + jnp.arange(num_parts)
        exists_c = first + index_c <= last
        part_c = 2 * (first + index_c) + (index_c == 0).astype(jnp.int32)
        lse_c = load(lse_ref.at[part_c, line], mask=exists_c, other=MASKED)
        part_cH = load(partial_ref.at[part_c[:, None], line, dim_H[None, :]], mask=exists_c[:, None], other=0.0)
        new_max = jnp.maximum(max_, lse_c.max(axis=0))
        weight_c = jnp.exp2(lse_c - new_max)
        shrink = jnp.exp2(max_ - new_max)
        return acc_H * shrink + (part_cH * weight_c[:, None]).sum(axis=0), new_max, sum_ * shrink + weight_c.sum(axis=0)

    @pl.when(first != last)
    def _():
        # A sink is a score that was seen already, of a value of zero.
        start = (sinks_refs[0][head, group] * LOG2E, jnp.float32(1)) if sinks_refs else (jnp.float32(MASKED), jnp.float32(0))
        state = (jnp.zeros((head_dim,), jnp.float32), *start)
        num_chunks = lax.div(last - first + num_parts, num_parts)
        acc_H, _, sum_ = lax.fori_loop(0, num_chunks, body, state)
        out_H = acc_H / jnp.where(sum_ == 0, 1.0, sum_)  # a row without keys: zeros
        store(out_ref.at[token, head, group, dim_H], out_H.astype(out_ref.dtype))
