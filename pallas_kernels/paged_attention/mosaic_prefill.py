"""Causal paged attention over ragged batches for Pallas Mosaic GPU (Hopper): prefill and chunked continuations.

    warpgroup 0, 1  (consumers)   block_q tokens of one query head each: the same tokens of two heads of a KV head,
                                  or, where G is odd, neighbouring tokens of one head
    warpgroup 2     (producer)    one TMA per page into a slice of the shared key and value tiles

    keys      | first tile |  .....  whole tiles  .....  | diagonal |
    loops      left edge of    without a mask              masked
               the window

A CTA per core stays for the whole launch and walks through work items (tile of tokens x heads), longest first and in snake order,
so that every CTA gets a like share. The producer runs ahead into the next item. The consumers take turns at the tensor cores: one
multiplies while the other computes its softmax (FlashAttention-3, Shah et al. 2024).

Tiles in shared memory begin at tokens that are multiples of 8, the rows of a swizzle tile (see `row_copies`): a row's first tile
may begin with queries of the row before it. They are computed and not stored.

Over a float8_e4m3fn cache the producer's warpgroup also widens each tile to the queries' type, from a place of its own in shared memory
(`eight_bits.widen_tile`). What no row owns may be NaN there: it becomes a number.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import _compat, row_copies
from pallas_kernels.paged_attention import eight_bits
from pallas_kernels.paged_attention.parts import NO_KEYS, Part
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles
from pallas_kernels.row_copies import Rows

LOG2E = math.log2(math.e)
MASKED = -1e30  # a finite score: a query may see nothing of a tile
NUM_CONSUMERS = 2
SWIZZLE_BYTES = 128
SMEM_BYTES = 227 << 10
TILE_ROWS = 8  # of the swizzled tiles in shared memory
MAX_NARROW_WIDTH = 128
"""Of heads in a cache of 8 bits: there is no room to widen tiles of wider ones."""
HAS_TAIL, FIRST, END = (
    4,
    5,
    6,
)  # columns of the item table after those of a tile table, the last two only over a part of the keys


@dataclass(frozen=True)
class MosaicPrefillTiles:
    """Sizes of the Mosaic prefill kernel; num_stages tiles of keys, and as many of values, are in shared memory."""

    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2
    q_slots: int = 2

    def smem_bytes(self, head_dim: int, is_narrow: bool = False) -> int:
        q = self.q_slots * NUM_CONSUMERS * self.block_q * head_dim
        kv = 2 * self.num_stages * self.block_kv * head_dim
        staging = NUM_CONSUMERS * self.block_q * min(head_dim, 64)
        narrow = 2 * self.block_kv * head_dim if is_narrow else 0
        return 2 * (q + kv + staging) + narrow + 1024  # barriers and alignment


def pick_tiles(head_dim: int, is_narrow: bool = False) -> MosaicPrefillTiles:
    """Sizes for a head width, and a cache of the queries' type or of 8 bits."""
    if is_narrow and head_dim == 128:
        return MosaicPrefillTiles(q_slots=1)
    if head_dim > 128:
        return MosaicPrefillTiles(block_kv=64, q_slots=1)
    return MosaicPrefillTiles(num_stages=2 if head_dim > 64 else 4)


def supports(
    *, platform: str, dtype: DTypeLike, num_groups: int, head_dim: int, interpret: bool = False, page_size: int | None = None
) -> bool:
    """Whether the kernel takes a case; page_size None: whatever it is, `paged_attention` checks it."""
    if (platform != "gpu" and not interpret) or not _compat.has_mosaic():
        return False
    if page_size is not None and not _takes_page_size(page_size, pick_tiles(head_dim).block_kv):
        return False
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim in (64, 128, 256)


def _takes_page_size(page_size: int, block_kv: int) -> bool:
    """Whole pages fill a tile or whole tiles fill a page, each of whole groups of 8 rows (the swizzle's)."""
    return page_size % 8 == 0 and (block_kv % page_size == 0 or page_size % block_kv == 0)


def paged_attention(
    q_TKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks_KG: jax.Array | None = None,
    part: Part | None = None,
    interpret: Any = False,
    tiles: MosaicPrefillTiles | None = None,
    min_tokens: int = 1,
) -> Any:
    """Rows of fewer than min_tokens tokens are left out: what the result holds in their place is undefined."""
    num_tokens, num_kv_heads, num_groups, head_dim = q_TKGH.shape
    page_size = k_pages_PKSH.shape[2]
    is_narrow = k_pages_PKSH.dtype.itemsize == 1
    tiles = tiles or pick_tiles(head_dim, is_narrow)
    _check(q_TKGH, k_pages_PKSH, v_pages_PKSH, tiles)
    plgpu = _compat.mosaic()
    # A copy into a tile of queries is cut where the array ends, but the array has whole swizzle groups and a tile at least.
    padding = max(-(-num_tokens // 8) * 8, tiles.block_q) - num_tokens
    padded_TKGH = jnp.pad(q_TKGH, ((0, padding), (0, 0), (0, 0), (0, 0))) if padding else q_TKGH
    heads_per_item = 2 if num_groups % 2 == 0 else 1
    item_tokens = tiles.block_q * NUM_CONSUMERS // heads_per_item
    table_NC, num_items_1 = make_items(
        query_start_R1,
        kv_length_R,
        num_tokens,
        item_tokens,
        page_size=page_size,
        window=window,
        min_tokens=min_tokens,
        heads=num_kv_heads * num_groups // heads_per_item,
        part=part,
    )
    if part is not None:
        num_items_1 = jnp.concatenate([num_items_1, jnp.asarray(part.rank, jnp.int32).reshape(1)])
    num_ctas = 2 if interpret else _compat.num_cores()
    pieces = max(1, tiles.block_kv // page_size)
    dtype = q_TKGH.dtype
    scratch = _scratch(tiles, pieces, head_dim, dtype, is_narrow=is_narrow, interpret=bool(interpret))
    unit = eight_bits.unit(dtype) if is_narrow else 1.0
    scales_2 = unit * jnp.stack([jnp.asarray(1.0 if x is None else x, jnp.float32).reshape(()) for x in (k_scale, v_scale)])
    optional = {"scales_ref": scales_2 if is_narrow else None, "sinks_ref": sinks_KG}
    operands = {name: x for name, x in optional.items() if x is not None}

    def body(q_ref, k_ref, v_ref, page_table_ref, table_ref, num_items_ref, *others):
        optional_refs, (out_ref, *refs) = others[: len(operands)], others[len(operands) :]
        lse_ref = None if part is None else refs.pop(0)
        _Prefill(
            plgpu=plgpu,
            tiles=tiles,
            score_scale=scale * LOG2E,
            soft_cap=None if soft_cap is None else soft_cap * LOG2E,
            window=window,
            num_ctas=num_ctas,
            heads_per_item=heads_per_item,
            pieces=pieces,
            q_ref=q_ref,
            k_ref=k_ref,
            v_ref=v_ref,
            page_table_ref=page_table_ref,
            table_ref=table_ref,
            num_items_ref=num_items_ref,
            **dict(zip(operands, optional_refs, strict=True)),
            out_ref=out_ref,
            lse_ref=lse_ref,
            num_parts=None if part is None else part.count,
            **dict(zip(scratch, refs, strict=True)),
        ).run()

    out_type = jax.ShapeDtypeStruct(padded_TKGH.shape, dtype)
    lse_type = jax.ShapeDtypeStruct((len(table_NC), num_kv_heads, num_groups, item_tokens), jnp.float32)
    result = plgpu.kernel(
        body,
        out_type=out_type if part is None else (out_type, lse_type),
        scratch_types=list(scratch.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        # Reads out of bounds give NaN.
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized"),
    )(padded_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, table_NC, num_items_1, *operands.values())
    if part is None:
        return result[:num_tokens] if padding else result
    out_TKGH, lse_NKGM = result
    return out_TKGH[:num_tokens], _by_token(lse_NKGM, table_NC, num_tokens)


def _by_token(lse_NKGM: jax.Array, table_NC: jax.Array, num_tokens: int) -> jax.Array:
    """[T, K, G], of what each item has for each line of its tiles."""
    first_N1, count_N1 = table_NC[:, TOKEN, None], table_NC[:, COUNT, None]
    token_NM = lax.div(first_N1, TILE_ROWS) * TILE_ROWS + jnp.arange(lse_NKGM.shape[3], dtype=jnp.int32)
    is_own_NM = (token_NM >= first_N1) & (token_NM < first_N1 + count_N1)
    empty = jnp.full((num_tokens, *lse_NKGM.shape[1:3]), NO_KEYS, jnp.float32)
    return empty.at[jnp.where(is_own_NM, token_NM, num_tokens)].set(lse_NKGM.transpose(0, 3, 1, 2), mode="drop")


def _check(q_TKGH: jax.Array, k_pages_PKSH: jax.Array, v_pages_PKSH: jax.Array, tiles: MosaicPrefillTiles) -> None:
    """Raise ValueError for what the kernel cannot take."""
    head_dim, page_size = q_TKGH.shape[3], k_pages_PKSH.shape[2]
    if not _takes_page_size(page_size, tiles.block_kv):
        raise ValueError(
            f"page size {page_size} neither divides key tiles of {tiles.block_kv} tokens nor is a multiple of them in steps of 8; "
            "use a page size of 8, 16, 32, 64 or a multiple of 128"
        )
    if {k_pages_PKSH.dtype, v_pages_PKSH.dtype} not in ({q_TKGH.dtype}, {jnp.dtype(jnp.float8_e4m3fn)}):
        raise ValueError(
            f"queries in {q_TKGH.dtype}, keys in {k_pages_PKSH.dtype}, values in {v_pages_PKSH.dtype}; give keys and values "
            "in the queries' type or both in float8_e4m3fn"
        )
    needed = tiles.smem_bytes(head_dim, k_pages_PKSH.dtype.itemsize == 1)
    if needed > SMEM_BYTES:
        raise ValueError(f"{tiles} takes {needed} bytes of shared memory, a core has {SMEM_BYTES}")


def _scratch(
    tiles: MosaicPrefillTiles, pieces: int, head_dim: int, dtype: jnp.dtype, *, is_narrow: bool, interpret: bool
) -> dict[str, Any]:
    """Shared memory and barriers by name; a tile of keys or values comes in so many pieces."""
    plgpu = _compat.mosaic()
    transforms = (
        plgpu.TilingTransform((TILE_ROWS, SWIZZLE_BYTES // dtype.itemsize)),
        plgpu.SwizzleTransform(SWIZZLE_BYTES),
    )
    stages, arrivals = tiles.num_stages, 1 if is_narrow else pieces
    scratch = {
        "q_smem": plgpu.SMEM((tiles.q_slots, NUM_CONSUMERS, tiles.block_q, head_dim), dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages, tiles.block_kv, head_dim), dtype, transforms=transforms),
        "v_smem": plgpu.SMEM((stages, tiles.block_kv, head_dim), dtype, transforms=transforms),
        # Rows of a tile that is not full leave one by one: the swizzled tile can only be cut every 8 rows.
        "out_smem": plgpu.SMEM((NUM_CONSUMERS, tiles.block_q, min(head_dim, 64)), dtype),
        "q_full": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=tiles.q_slots),
        "q_free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=tiles.q_slots),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
        "v_raw": plgpu.Barrier(num_arrivals=pieces, num_barriers=1),
        "turn": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=1),
    }
    if is_narrow:
        narrow = plgpu.SMEM((tiles.block_kv, head_dim), jnp.float8_e4m3fn, transforms=eight_bits.transforms(head_dim))
        scratch |= {"k_narrow": narrow, "v_narrow": narrow, "k_raw": plgpu.Barrier(num_arrivals=pieces, num_barriers=1)}
    if interpret:
        scratch["p_smem"] = plgpu.SMEM((NUM_CONSUMERS, tiles.block_q, tiles.block_kv), dtype, transforms=transforms)
    return scratch


def make_items(
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    num_tokens: int,
    item_tokens: int,
    *,
    page_size: int,
    window: int | None,
    min_tokens: int,
    heads: int,
    part: Part | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tile table with those that see most keys first, and the number of work items, `heads` for each tile in use.

    The fifth column, HAS_TAIL, is 1 where the last page that a tile sees has slots that its row does not own. Over a part of the keys
    two more follow: the first of its keys that a tile sees, and the one behind the last; 0 if it sees none.
    """
    tiles_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, item_tokens, min_tokens=min_tokens, align=TILE_ROWS)
    end_N = jnp.where(tiles_N4[:, COUNT] > 0, jnp.maximum(tiles_N4[:, POSITION] + tiles_N4[:, COUNT], 0), 0)
    row_N = jnp.minimum(tiles_N4[:, ROW], kv_length_R.shape[0] - 1)
    if part is not None:
        end_N, kv_length_R = part.keys_before(end_N, page_size), part.keys_before(kv_length_R, page_size)
        first_N = jnp.zeros_like(end_N)
        if window is not None:
            first_N = part.keys_before(tiles_N4[:, POSITION] - (window - 1), page_size)
        first_N, end_N = (jnp.where(first_N < end_N, x, 0) for x in (first_N, end_N))
    tail_N = (end_N > 0) & (-(-end_N // page_size) * page_size > kv_length_R[row_N])
    seen_N = (
        end_N if window is None else end_N - first_N if part is not None else jnp.minimum(end_N, tiles_N4[:, COUNT] + window)
    )
    cost_N = jnp.where(tiles_N4[:, COUNT] > 0, seen_N + 1, 0)
    index_N = jnp.arange(cost_N.shape[0])
    before_NN = (cost_N[None, :] > cost_N[:, None]) | (
        (cost_N[None, :] == cost_N[:, None]) & (index_N[None, :] < index_N[:, None])
    )
    rank_N = jnp.sum(before_NN, axis=1, dtype=jnp.int32)
    table_NC = jnp.concatenate([tiles_N4.at[:, ROW].set(row_N), tail_N[:, None].astype(jnp.int32)], axis=1)
    if part is not None:
        table_NC = jnp.concatenate([table_NC, first_N[:, None], end_N[:, None]], axis=1)
    num_items = jnp.sum(tiles_N4[:, COUNT] > 0, dtype=jnp.int32) * heads
    return jnp.zeros_like(table_NC).at[rank_N].set(table_NC, unique_indices=True), num_items[None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Item:
    """A work item of a CTA: tokens of one row, `group` the first of its query heads; keys first_tile up to end_tile."""

    head: jax.Array
    group: jax.Array
    token: jax.Array
    count: jax.Array
    position: jax.Array
    row: Any = None  # what follows only the producer needs
    has_tail: Any = None
    first_in_part: Any = None  # keys of the part
    end_in_part: Any = None

    def end(self) -> jax.Array:
        if self.end_in_part is not None:
            return self.end_in_part
        return jnp.where(self.count > 0, jnp.maximum(self.position + self.count, 0), 0)


@dataclass(frozen=True)
class _Prefill:
    """The kernel's references and sizes. Every barrier's phases are waited for one by one, by each of its waiters."""

    plgpu: Any
    tiles: MosaicPrefillTiles
    score_scale: Any
    soft_cap: float | None
    window: int | None
    num_ctas: int
    heads_per_item: int
    pieces: int
    q_ref: Any  # [T, K, G, H]
    k_ref: Any  # [P, K, S, H]
    v_ref: Any  # [P, K, S, H]
    page_table_ref: Any  # [R, B]
    table_ref: Any  # [N, 5], or [N, 7] over a part of the keys
    num_items_ref: Any  # [1], or with the part's rank [2]
    out_ref: Any  # [T, K, G, H]
    lse_ref: Any  # [N, K, G, tokens of an item] float32, or None
    num_parts: int | None  # that the keys are split into, of which this is one; None: they are whole
    q_smem: Any
    k_smem: Any
    v_smem: Any
    out_smem: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    v_raw: Any
    turn: Any
    sinks_ref: Any = None  # [K, G] float32, if there are any
    scales_ref: Any = None  # [2] float32 of keys and values, and what follows, only over a cache of 8 bits
    k_narrow: Any = None
    v_narrow: Any = None
    k_raw: Any = None
    p_smem: Any = None  # only where interpreted

    def run(self) -> None:
        # Three warpgroups start with 168 registers a thread. Asking for more than that in all would wait forever.
        consumer_registers, producer_registers = (224, 56) if self.q_ref.shape[3] == 64 else (232, 40)
        if self.scales_ref is not None:
            consumer_registers, producer_registers = 224, 56
        wg = lax.axis_index("wg")

        @pl.when(wg < NUM_CONSUMERS)
        def _():
            self.plgpu.set_max_registers(consumer_registers, action="increase")
            self.consume(wg)

        @pl.when(wg == NUM_CONSUMERS)
        def _():
            self.plgpu.set_max_registers(producer_registers, action="decrease")
            self.produce() if self.scales_ref is None else self.produce_widened()

    # Work items

    def item_index(self, turn: jax.Array) -> jax.Array:
        """The CTA's item in a round: CTAs take them in order, then in reverse order, and so on."""
        cta = lax.axis_index("cta")
        return turn * self.num_ctas + jnp.where(lax.rem(turn, 2) == 0, cta, self.num_ctas - 1 - cta)

    def num_my_items(self) -> jax.Array:
        num_items = self.num_items_ref[0]
        full = lax.div(num_items, self.num_ctas)
        return full + jnp.where(self.item_index(full) < num_items, 1, 0)

    def heads_of_tile(self) -> tuple[int, int]:
        """Items per KV head of a tile of tokens, and per tile."""
        groups = self.q_ref.shape[2] // self.heads_per_item
        return groups, self.q_ref.shape[1] * groups

    def load(self, turn: jax.Array, columns: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """The columns of the table for the item of a round; past the last round, those of some other item."""
        tile = jnp.minimum(lax.div(self.item_index(turn), self.heads_of_tile()[1]), self.table_ref.shape[0] - 1)
        return tuple(self.table_ref[tile, column] for column in columns)

    def item(self, turn: jax.Array, columns: tuple[jax.Array, ...]) -> _Item:
        groups, heads = self.heads_of_tile()
        pair = lax.rem(self.item_index(turn), heads)
        place = lax.div(pair, groups), lax.rem(pair, groups) * self.heads_per_item
        if self.num_parts is None:
            return _Item(*place, *columns)
        first, end, *others = columns
        return replace(_Item(*place, *others), first_in_part=first, end_in_part=end)

    @property
    def keys_of_part(self) -> tuple[int, ...]:
        """The columns of an item's range of keys, if it must be looked up."""
        return () if self.num_parts is None else (FIRST, END)

    def keys_before(self, position: jax.Array) -> jax.Array:
        """Keys before a position, of those that are here."""
        if self.num_parts is None:
            return position
        return Part(self.num_items_ref[1], self.num_parts).keys_before(position, self.k_ref.shape[2])

    def first_tile(self, item: _Item) -> jax.Array:
        return lax.div(self.first_key(item), self.tiles.block_kv)

    def first_key(self, item: _Item) -> jax.Array:
        if self.window is None:
            return jnp.int32(0)
        if item.first_in_part is not None:
            return item.first_in_part
        return jnp.maximum(item.position - (self.window - 1), 0)

    def end_tile(self, item: _Item) -> jax.Array:
        return lax.div(item.end() + (self.tiles.block_kv - 1), self.tiles.block_kv)

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, self.tiles.num_stages)

    # Producer

    def produce(self) -> None:
        num_items = self.num_my_items()

        def do_item(index, base):
            item = self.item(index, self.load(index, (*self.keys_of_part, TOKEN, COUNT, POSITION, ROW, HAS_TAIL)))
            self.load_queries(index, item)
            first, end = self.first_tile(item), self.end_tile(item)
            lax.fori_loop(
                first,
                end,
                lambda tile, pages: self.load_tile(item, tile, end, base + tile - first, pages),
                self.pages(item, first),
            )
            return base + end - first

        num_steps = lax.fori_loop(0, num_items, do_item, jnp.int32(0))
        self.drain(num_steps, num_items)

    def load_queries(self, index: jax.Array, item: _Item) -> None:
        """Starts the copy of an item's queries as soon as there is a place."""
        plgpu = self.plgpu
        q_slot = lax.rem(index, self.tiles.q_slots)
        pl.when(index >= self.tiles.q_slots)(lambda: plgpu.barrier_wait(self.q_free.at[q_slot]))
        for wg in range(NUM_CONSUMERS):
            group, token = self.q_place(item, wg)
            row_copies.load(
                self.q_ref,
                self.full_tile(token),
                self.q_smem.at[q_slot, wg],
                self.q_full.at[q_slot],
                after=(item.head, group),
            )

    def drain(self, num_steps: jax.Array, num_items: jax.Array) -> None:
        """What the consumers still release must have arrived before the barriers go."""
        plgpu = self.plgpu

        @pl.loop(jnp.maximum(num_steps - self.tiles.num_stages, 0), num_steps)
        def _(step):
            plgpu.barrier_wait(self.k_free.at[self.slot(step)])
            plgpu.barrier_wait(self.v_free.at[self.slot(step)])

        @pl.loop(jnp.maximum(num_items - self.tiles.q_slots, 0), num_items)
        def _(index):
            plgpu.barrier_wait(self.q_free.at[lax.rem(index, self.tiles.q_slots)])

    def q_place(self, item: _Item, wg: Any) -> tuple[Any, Any]:
        """Query head within the group, and the token of the first row in shared memory, of a consumer."""
        origin = lax.div(item.token, TILE_ROWS) * TILE_ROWS
        return item.group + wg % self.heads_per_item, origin + wg // self.heads_per_item * self.tiles.block_q

    def full_tile(self, token: Any) -> Rows:
        """The tile of queries, or results, that begins at a token."""
        return Rows(lax.div(token, TILE_ROWS), TILE_ROWS, self.tiles.block_q)

    def pages(self, item: _Item, tile: jax.Array) -> tuple[jax.Array, ...]:
        """The pages of a tile of keys. Pages outside of what the item sees, which may hold NaN, give way to the nearest inside."""
        page_size = self.k_ref.shape[2]
        first, last = lax.div(self.first_key(item), page_size), lax.div(jnp.maximum(item.end() - 1, 0), page_size)

        def page(piece: int) -> jax.Array:
            index = lax.div(tile * self.tiles.block_kv + piece * page_size, page_size)
            return self.page_table_ref[item.row, jnp.minimum(jnp.maximum(index, first), last)]

        return tuple(page(piece) for piece in range(self.pieces))

    def load_tile(
        self, item: _Item, tile: jax.Array, end_tile: jax.Array, step: jax.Array, pages: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        plgpu, block_kv = self.plgpu, self.tiles.block_kv
        page_size = self.k_ref.shape[2]
        rows = min(page_size, block_kv)
        slot = self.slot(step)
        next_pages = self.pages(item, jnp.minimum(tile + 1, end_tile - 1))  # in flight while this tile waits for its place
        part = Rows(lax.rem(tile, page_size // block_kv) if page_size > block_kv else 0, rows, rows)

        def copy(pages_ref, smem, barrier):
            for piece, page in enumerate(pages):
                row_copies.load(pages_ref, part, smem.at[slot, pl.ds(piece * rows, rows)], barrier, before=(page, item.head))

        pl.when(step >= self.tiles.num_stages)(lambda: plgpu.barrier_wait(self.k_free.at[slot]))
        copy(self.k_ref, self.k_smem, self.k_full.at[slot])
        pl.when(step >= self.tiles.num_stages)(lambda: plgpu.barrier_wait(self.v_free.at[slot]))
        has_tail = (item.has_tail == 1) & (tile == end_tile - 1)

        @pl.when(jnp.logical_not(has_tail))
        def _():
            copy(self.v_ref, self.v_smem, self.v_full.at[slot])

        @pl.when(has_tail)
        def _():
            # Zero times NaN is NaN: values that nobody sees are wiped before a consumer sees the tile. Those before the window can
            # be of the last page too, where that is also the first (see `pages`).
            copy(self.v_ref, self.v_smem, self.v_raw.at[0])
            plgpu.barrier_wait(self.v_raw.at[0])
            first = None if self.window is None else self.first_key(item) - tile * block_kv
            self.wipe(self.v_smem.at[slot], first, item.end() - tile * block_kv)
            plgpu.commit_smem()
            for _ in range(self.pieces):
                plgpu.barrier_arrive(self.v_full.at[slot])

        return next_pages

    def produce_widened(self) -> None:
        """`produce` of keys and values of 8 bits: a tile is widened while the next one is copied, also the first of the next item."""
        plgpu = self.plgpu
        num_items, needed = self.num_my_items(), (*self.keys_of_part, TOKEN, COUNT, POSITION, ROW)

        def has_keys(item: _Item) -> jax.Array:
            return self.first_tile(item) < self.end_tile(item)

        def do_item(index, carry):
            base, columns = carry
            item, next_columns = self.item(index, columns), self.load(index + 1, needed)
            first, end = self.first_tile(item), self.end_tile(item)
            pl.when(first == end)(lambda: self.load_queries(index, item))
            next_item = self.item(index + 1, next_columns)
            # Items without keys are the last ones.
            is_another = (index + 1 < num_items) & has_keys(next_item)

            def do_tile(tile, _):
                is_last = tile + 1 == end
                upcoming = jax.tree.map(lambda x, y: jnp.where(is_last, x, y), next_item, item)
                upcoming_tile = jnp.where(is_last, self.first_tile(next_item), tile + 1)
                pages = self.pages(upcoming, upcoming_tile)  # in flight while this tile is widened
                slot = self.slot(base + tile - first)
                for letter in "kv":
                    narrow, wide = getattr(self, f"{letter}_narrow"), getattr(self, f"{letter}_smem").at[slot]
                    plgpu.barrier_wait(getattr(self, f"{letter}_raw").at[0])
                    free = getattr(self, f"{letter}_free").at[slot]
                    pl.when(base + tile - first >= self.tiles.num_stages)(functools.partial(plgpu.barrier_wait, free))
                    eight_bits.widen(narrow, wide) if self.p_smem is not None else eight_bits.widen_tile(narrow, wide)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(getattr(self, f"{letter}_full").at[slot])
                    copy = functools.partial(self.copy_narrow, letter, upcoming, upcoming_tile, pages)
                    pl.when(jnp.logical_not(is_last) | is_another)(copy)
                # Their place may be free only when the item before has ended, the first tile's earlier.
                pl.when(tile == first)(lambda: self.load_queries(index, item))

            lax.fori_loop(first, end, do_tile, None)
            return base + end - first, next_columns

        columns = self.load(jnp.int32(0), needed)
        item = self.item(jnp.int32(0), columns)

        @pl.when((num_items > 0) & has_keys(item))
        def _():
            tile = self.first_tile(item)
            pages = self.pages(item, tile)
            for letter in "kv":
                self.copy_narrow(letter, item, tile, pages)

        num_steps, _ = lax.fori_loop(0, num_items, do_item, (jnp.int32(0), columns))
        self.drain(num_steps, num_items)

    def copy_narrow(self, letter: str, item: _Item, tile: jax.Array, pages: tuple[jax.Array, ...]) -> None:
        """Starts the copy of a tile of keys or values as they are stored."""
        source, target = getattr(self, f"{letter}_ref"), getattr(self, f"{letter}_narrow")
        page_size, block_kv = source.shape[2], self.tiles.block_kv
        rows = min(page_size, block_kv)
        part = Rows(lax.rem(tile, page_size // block_kv) if page_size > block_kv else 0, rows, rows)
        for piece, page in enumerate(pages):
            place = target.at[pl.ds(piece * rows, rows)]
            row_copies.load(source, part, place, getattr(self, f"{letter}_raw").at[0], before=(page, item.head))

    def wipe(self, smem: Any, first: jax.Array | None, end: jax.Array) -> None:
        """Zeroes the rows of a tile before `first`, if there is one, and from `end` on."""
        plgpu = self.plgpu
        size = 64
        for top in range(0, self.tiles.block_kv, size):

            @pl.when((end < top + size) if first is None else (first > top) | (end < top + size))
            def _(top=top):
                for left in range(0, smem.shape[1], size):
                    part = smem.at[pl.ds(top, size), pl.ds(left, size)]
                    values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                    row = plgpu.broadcasted_iota(jnp.int32, (size, size), 0, layout=plgpu.Layout.WGMMA)
                    is_seen = row < end - top
                    if first is not None:
                        is_seen &= row >= first - top
                    part[...] = jnp.where(is_seen, values, jnp.zeros_like(values))

    # Consumers

    def consume(self, wg: jax.Array) -> None:
        if self.scales_ref is not None:
            self = replace(self, score_scale=self.score_scale * self.scales_ref[0])
        plgpu = self.plgpu
        num_items, needed = self.num_my_items(), (*self.keys_of_part, TOKEN, COUNT, POSITION)
        pl.when(wg == 1)(self.take_turns)

        def do_item(index, carry):
            base, columns = carry
            next_columns = self.load(index + 1, needed)  # in flight during this item
            item = self.item(index, columns)
            self.attend(wg, index, base, item)
            return base + self.end_tile(item) - self.first_tile(item), next_columns

        lax.fori_loop(0, num_items, do_item, (jnp.int32(0), self.load(jnp.int32(0), needed)))
        pl.when(wg == 0)(self.take_turns)
        plgpu.wait_smem_to_gmem(0)
        if self.tiles.q_slots > 1:
            pl.when(num_items > 0)(lambda: plgpu.barrier_arrive(self.q_free.at[lax.rem(num_items - 1, self.tiles.q_slots)]))

    def take_turns(self) -> None:
        """Hands the tensor cores to the other consumer when that asks for them."""
        self.plgpu.barrier_arrive(self.turn.at[0])
        self.plgpu.barrier_wait(self.turn.at[0])

    def attend(self, wg: jax.Array, index: jax.Array, base: jax.Array, item: _Item) -> None:
        plgpu, block_q, block_kv = self.plgpu, self.tiles.block_q, self.tiles.block_kv
        head_dim = self.q_ref.shape[3]
        q_slot = lax.rem(index, self.tiles.q_slots)
        group, token = self.q_place(item, wg)
        q_smem = self.q_smem.at[q_slot, wg]
        first, end = self.first_tile(item), self.end_tile(item)
        position = item.position + (token - item.token)

        plgpu.barrier_wait(self.q_full.at[q_slot])
        pl.when(end > first)(lambda: plgpu.barrier_wait(self.k_full.at[self.slot(base)]))
        # A sink is a score that was seen already, of a value of zero.
        top = MASKED if self.sinks_ref is None else self.sinks_ref[item.head, group] * LOG2E
        carry = (
            plgpu.layout_cast(jnp.zeros((block_q, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((block_q,), top, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
            plgpu.layout_cast(
                jnp.full((block_q,), 0.0 if self.sinks_ref is None else 1.0, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
            ),
        )
        step = functools.partial(self.step, wg, q_smem, item, position, base - first, end)
        # The item's first query sees a tile whole from its first key up to its own position.
        whole_end = jnp.clip(lax.div(jnp.maximum(self.keys_before(item.position + 1), 0), block_kv), first, end)
        whole = first
        if self.window is not None:
            # The first key that the last query sees.
            left = jnp.maximum(self.keys_before(item.position + item.count - self.window), 0)
            whole = jnp.clip(lax.div(left + (block_kv - 1), block_kv), first, whole_end)
            carry = lax.fori_loop(first, whole, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(whole, whole_end, functools.partial(step, masked=False), carry)
        if self.tiles.q_slots > 1:
            # The store of the last item has had this item's time to leave its place to the next item's queries.
            pl.when(index > 0)(lambda: self.release_q(index - 1))
        acc_MH, max_M, sum_M = lax.fori_loop(whole_end, end, functools.partial(step, masked=True), carry)

        self.take_turns()  # the other consumer has the tensor cores while this one normalises and stores
        inverse_M = (1.0 if self.scales_ref is None else self.scales_ref[1]) / jnp.where(sum_M == 0.0, 1.0, sum_M)
        if self.num_parts is not None:
            has_keys_M = max_M > MASKED  # queries without keys here have summed masked scores
            inverse_M = jnp.where(has_keys_M, inverse_M, 0.0)
            lse_M = jnp.where(has_keys_M, (max_M + jnp.log2(sum_M)) * math.log(2), NO_KEYS)
            line = wg // self.heads_per_item * block_q
            tile = lax.div(self.item_index(index), self.heads_of_tile()[1])
            self.lse_ref.at[tile, item.head, group, pl.ds(line, block_q)][...] = lse_M
        out_MH = acc_MH * lax.broadcast_in_dim(inverse_M, acc_MH.shape, [0])
        begin, end_row = (jnp.clip(x - token, 0, block_q) for x in (item.token, item.token + item.count))
        self.store(wg, q_smem, out_MH, item.head, group, token, begin, end_row)
        if self.tiles.q_slots == 1:
            self.release_q(index)
        self.take_turns()

    def release_q(self, index: jax.Array) -> None:
        self.plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.plgpu.barrier_arrive(self.q_free.at[lax.rem(index, self.tiles.q_slots)])

    def step(
        self,
        wg: jax.Array,
        q_smem: Any,
        item: _Item,
        position: jax.Array,
        base: jax.Array,
        end_tile: jax.Array,
        tile: jax.Array,
        carry: tuple[jax.Array, ...],
        *,
        masked: bool,
    ) -> tuple[jax.Array, ...]:
        """One tile of keys: scores, softmax in base 2, values. On entry the tile's keys are there and it is this consumer's turn."""
        plgpu, block_q, block_kv = self.plgpu, self.tiles.block_q, self.tiles.block_kv
        acc_MH, max_M, sum_M = carry
        slot = self.slot(base + tile)

        def multiply_keys(acc_ref):
            plgpu.wgmma(acc_ref, q_smem, self.k_smem.at[slot].transpose((1, 0)))
            self.take_turns()
            return acc_ref[...]

        scores_Mk = pl.run_scoped(multiply_keys, plgpu.ACC((block_q, block_kv), jnp.float32))
        plgpu.barrier_arrive(self.k_free.at[slot])

        score_scale = self.score_scale
        if self.soft_cap is not None:
            scores_Mk = self.soft_cap * jnp.tanh(scores_Mk * (score_scale / self.soft_cap))
            score_scale = 1.0
        if masked:
            # Scaled before the mask: a masked score must equal a masked maximum exactly.
            scores_Mk = scores_Mk * score_scale
            score_scale = 1.0
            query = plgpu.broadcasted_iota(jnp.int32, (block_q, block_kv), 0, layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, (block_q, block_kv), 1, layout=plgpu.Layout.WGMMA)
            if self.num_parts is None:
                ahead_Mk = (key - query) + (tile * block_kv - position)
                scores_Mk = jnp.where(ahead_Mk <= 0, scores_Mk, MASKED)
                if self.window is not None:
                    scores_Mk = jnp.where(ahead_Mk > -self.window, scores_Mk, MASKED)
            else:
                key, behind = key + tile * block_kv, query + (position + 1)
                scores_Mk = jnp.where(key < self.keys_before(behind), scores_Mk, MASKED)
                if self.window is not None:
                    scores_Mk = jnp.where(key >= self.keys_before(behind - self.window), scores_Mk, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1) * score_scale)
        shrink_M = jnp.exp2(max_M - new_max_M)
        weights_Mk = jnp.exp2(scores_Mk * score_scale - lax.broadcast_in_dim(new_max_M, scores_Mk.shape, [0]))
        acc_MH = acc_MH * lax.broadcast_in_dim(shrink_M, acc_MH.shape, [0])
        sum_M = sum_M * shrink_M + weights_Mk.sum(axis=1)
        low_Mk = weights_Mk.astype(self.v_smem.dtype)
        acc_MH, sum_M, new_max_M, low_Mk = lax.optimization_barrier((acc_MH, sum_M, new_max_M, low_Mk))

        plgpu.barrier_arrive(self.turn.at[0])
        plgpu.barrier_wait(self.v_full.at[slot])
        plgpu.barrier_wait(self.turn.at[0])

        def wait_for_next_keys():
            next_slot = self.slot(base + tile + 1)
            pl.when(tile + 1 < end_tile)(lambda: plgpu.barrier_wait(self.k_full.at[next_slot]))

        acc_MH = self.multiply_values(wg, acc_MH, low_Mk, self.v_smem.at[slot], wait_for_next_keys)
        plgpu.barrier_arrive(self.v_free.at[slot])
        return acc_MH, new_max_M, sum_M

    def multiply_values(
        self, wg: jax.Array, acc_MH: jax.Array, weights_Mk: jax.Array, v_smem: Any, meanwhile: Any
    ) -> jax.Array:
        """acc + weights @ values, with `meanwhile` called while it runs; the interpreter knows neither operand in registers."""
        plgpu = self.plgpu
        if self.p_smem is None:

            def multiply(acc_ref):
                plgpu.wgmma(acc_ref, weights_Mk, v_smem)
                meanwhile()

            return pl.run_state(multiply)(plgpu.ACC.init(acc_MH))
        p_smem = self.p_smem.at[wg]
        p_smem[...] = weights_Mk
        plgpu.commit_smem()

        def multiply_from_smem(acc_ref):
            plgpu.wgmma(acc_ref, p_smem, v_smem)
            meanwhile()
            return acc_ref[...]

        return acc_MH + pl.run_scoped(multiply_from_smem, plgpu.ACC(acc_MH.shape, jnp.float32))

    def store(
        self,
        wg: jax.Array,
        q_smem: Any,
        out_MH: jax.Array,
        head: jax.Array,
        group: jax.Array,
        token: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> None:
        """Writes rows begin to end: a full tile at once, by way of the queries' place, another in runs of powers of two."""
        plgpu, block_q = self.plgpu, self.tiles.block_q
        dtype, width = self.out_ref.dtype, self.out_smem.shape[2]
        count = end - begin

        @pl.when(count == block_q)
        def _():
            for left in range(0, out_MH.shape[1], width):
                q_smem[:, left : left + width] = out_MH[:, left : left + width].astype(dtype)
            plgpu.commit_smem()
            row_copies.store(q_smem, self.out_ref, self.full_tile(token), after=(head, group))

        @pl.when((count > 0) & (count < block_q))
        def _():
            staging = self.out_smem.at[wg]
            for left in range(0, out_MH.shape[1], width):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staging[...] = out_MH[:, left : left + width].astype(dtype)
                plgpu.commit_smem()
                for bit in range(block_q.bit_length() - 1):
                    size = 1 << bit
                    offset = begin + (count & ~(2 * size - 1))  # longer runs come first

                    @pl.when((count & size) != 0)
                    def _(size=size, offset=offset, left=left):
                        run, columns = Rows(token + offset, 1, size), pl.ds(left, width)
                        row_copies.store(staging.at[pl.ds(offset, size)], self.out_ref, run, after=(head, group, columns))
