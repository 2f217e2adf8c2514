"""Segment attention for Pallas Mosaic GPU (Hopper).

    warpgroup 0, 1  (consumers)   block_q queries each of a tile, for one head
    warpgroup 2     (producer)    the keys that any of these queries sees, in chunks, and their values

A tile inside of one segment meets chunks without a mask but for the first and the last; another masks all of them by the bounds of
each query. Chunks begin at multiples of 8 patches, the rows of a swizzle tile (see `row_copies`). The consumers take turns at the
tensor cores: one multiplies while the other computes its softmax (FlashAttention-3, Shah et al. 2024).

A head of 72 or 80 values is cut into parts of 64 and 16, each an array of its own: tiles in shared memory divide the width of an array.
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
from jax.typing import DTypeLike

from pallas_kernels import _compat, row_copies
from pallas_kernels.row_copies import Rows
from pallas_kernels.segment_attention.parts import MIN_PART, head_parts
from pallas_kernels.segment_attention.segments import bounds, tile_keys

LOG2E = math.log2(math.e)
MASKED = -1e30  # a finite score: a query may see nothing of a chunk
NUM_CONSUMERS = 2
TILE_ROWS = 8  # of the swizzled tiles in shared memory
MAX_SWIZZLE_BYTES = 128


@dataclass(frozen=True)
class MosaicTiles:
    """Queries of a consumer, keys of a chunk; num_stages chunks of keys, and as many of values, are in shared memory."""

    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2


def pick_tiles(head_dim: int) -> MosaicTiles:
    """Sizes for a head width."""
    return MosaicTiles(num_stages=2 if head_dim > 96 else 4)


def supports(*, platform: str, dtype: DTypeLike, head_dim: int, interpret: bool = False) -> bool:
    takes = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and MIN_PART <= head_dim <= 128
    return takes and (platform == "gpu" or interpret) and _compat.has_mosaic()


def segment_attention(
    q_PHd: jax.Array,
    k_PHd: jax.Array,
    v_PHd: jax.Array,
    segment_P: jax.Array,
    *,
    scale: float,
    interpret: Any = False,
    tiles: MosaicTiles | None = None,
) -> jax.Array:
    num_patches, num_heads, head_dim = q_PHd.shape
    tiles = tiles or pick_tiles(head_dim)
    parts = head_parts(head_dim)
    tile = NUM_CONSUMERS * tiles.block_q
    start_P, end_P = bounds(segment_P)
    keys_N3 = tile_keys(start_P, end_P, tile)
    # Whole tiles of queries, and room for a chunk of keys that begins with the last patch; whole parts of heads.
    num_rows = len(keys_N3) * tile + tiles.block_kv
    padding = ((0, num_rows - num_patches), (0, 0), (0, sum(parts[-1]) - head_dim))
    is_real_P11 = (segment_P >= 0)[:, None, None]

    def cut(x_PHd: jax.Array) -> list[jax.Array]:
        padded_PHd = jnp.pad(jnp.where(is_real_P11, x_PHd, 0), padding)
        return [padded_PHd[:, :, first : first + size] for first, size in parts]

    start_P, end_P = (jnp.pad(x, (0, num_rows - num_patches)) for x in (start_P, end_P))
    plgpu = _compat.mosaic()
    sizes = tuple(size for _, size in parts)
    scratch = _scratch(tiles, sizes, q_PHd.dtype, interpret=bool(interpret))

    def body(*refs: Any) -> None:
        count = len(parts)
        q_refs, k_refs, v_refs = (refs[start : start + count] for start in range(0, 3 * count, count))
        start_ref, end_ref, keys_ref, *others = refs[3 * count :]
        _Attention(
            plgpu=plgpu,
            tiles=tiles,
            score_scale=scale * LOG2E,
            q_refs=q_refs,
            k_refs=k_refs,
            v_refs=v_refs,
            start_ref=start_ref,
            end_ref=end_ref,
            keys_ref=keys_ref,
            out_refs=others[:count],
            **dict(zip(scratch, others[count:], strict=True)),
        ).run()

    outs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((len(keys_N3) * tile, num_heads, size), q_PHd.dtype) for size in sizes],
        scratch_types=list(scratch.values()),
        grid=(len(keys_N3), num_heads),
        grid_names=("tile", "head"),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_compat.mosaic_interpret(interpret),
    )(*cut(q_PHd), *cut(k_PHd), *cut(v_PHd), start_P, end_P, keys_N3)
    return jnp.concatenate(outs, axis=2)[:num_patches, :, :head_dim]


def _scratch(tiles: MosaicTiles, sizes: tuple[int, ...], dtype: jnp.dtype, *, interpret: bool) -> dict[str, Any]:
    """Shared memory by name, a list for the parts of a head, and barriers."""
    plgpu = _compat.mosaic()

    def rows(*shape: int) -> Any:
        swizzle = min(MAX_SWIZZLE_BYTES, shape[-1] * dtype.itemsize)
        transforms = (plgpu.TilingTransform((TILE_ROWS, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def barrier(num_arrivals: int, num_barriers: int) -> Any:
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    stages, num_parts = tiles.num_stages, len(sizes)
    scratch: dict[str, Any] = {
        "q_smem": [rows(NUM_CONSUMERS, tiles.block_q, size) for size in sizes],
        "k_smem": [rows(stages, tiles.block_kv, size) for size in sizes],
        "v_smem": [rows(stages, tiles.block_kv, size) for size in sizes],
        "q_full": barrier(num_parts, NUM_CONSUMERS),
        "k_full": barrier(num_parts, stages),
        "k_free": barrier(NUM_CONSUMERS, stages),
        "v_full": barrier(num_parts, stages),
        "v_free": barrier(NUM_CONSUMERS, stages),
        "turn": barrier(NUM_CONSUMERS, 1),
    }
    if interpret:
        scratch["p_smem"] = rows(NUM_CONSUMERS, tiles.block_q, tiles.block_kv)
    return scratch


@dataclass(frozen=True)
class _Attention:
    """The kernel's references and sizes. What is several has an entry for each part of a head."""

    plgpu: Any
    tiles: MosaicTiles
    score_scale: float
    q_refs: Sequence[Any]  # [P, H, d], rows and values padded
    k_refs: Sequence[Any]  # [P, H, d]
    v_refs: Sequence[Any]  # [P, H, d]
    start_ref: Any  # [P]
    end_ref: Any  # [P]
    keys_ref: Any  # [N, 3]
    out_refs: Sequence[Any]  # [P, H, d]
    q_smem: Sequence[Any]
    k_smem: Sequence[Any]
    v_smem: Sequence[Any]
    q_full: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any
    p_smem: Any = None  # only where interpreted

    def run(self) -> None:
        wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
        first, end, sees_all = (self.keys_ref[tile, column] for column in range(3))
        origin = lax.div(first, TILE_ROWS)  # of the first chunk, in units of TILE_ROWS
        num_chunks = lax.div(end - origin * TILE_ROWS + (self.tiles.block_kv - 1), self.tiles.block_kv)

        @pl.when(wg < NUM_CONSUMERS)
        def _():
            self.plgpu.set_max_registers(232, action="increase")
            self.consume(wg, tile, origin, num_chunks, self.whole_chunks(origin, first, end, sees_all))

        @pl.when(wg == NUM_CONSUMERS)
        def _():
            self.plgpu.set_max_registers(40, action="decrease")
            self.produce(tile, origin, num_chunks)

    def whole_chunks(self, origin: Any, first: Any, end: Any, sees_all: Any) -> tuple[Any, Any]:
        """The chunks, from the first up to the second number, all of whose keys all of a tile's queries see."""
        begin = jnp.where(origin * TILE_ROWS < first, 1, 0)
        stop = lax.div(end - origin * TILE_ROWS, self.tiles.block_kv)
        stop = jnp.where(sees_all == 1, jnp.maximum(stop, begin), begin)
        return begin, stop

    def slot(self, chunk: Any) -> Any:
        return lax.rem(chunk, self.tiles.num_stages)

    # Producer

    def produce(self, tile: Any, origin: Any, num_chunks: Any) -> None:
        plgpu, tiles, head = self.plgpu, self.tiles, lax.axis_index("head")
        for wg in range(NUM_CONSUMERS):
            self.load(self.q_refs, self.query_rows(tile, wg), [smem.at[wg] for smem in self.q_smem], self.q_full.at[wg], head)

        @pl.loop(0, num_chunks)
        def _(chunk):
            slot = self.slot(chunk)
            rows = Rows(origin + chunk * (tiles.block_kv // TILE_ROWS), TILE_ROWS, tiles.block_kv)
            for refs, smem, free, full in (
                (self.k_refs, self.k_smem, self.k_free, self.k_full),
                (self.v_refs, self.v_smem, self.v_free, self.v_full),
            ):
                pl.when(chunk >= tiles.num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                self.load(refs, rows, [each.at[slot] for each in smem], full.at[slot], head)

        # What the consumers still release must have arrived before the barriers go.
        @pl.loop(jnp.maximum(num_chunks - tiles.num_stages, 0), num_chunks)
        def _(chunk):
            plgpu.barrier_wait(self.k_free.at[self.slot(chunk)])
            plgpu.barrier_wait(self.v_free.at[self.slot(chunk)])

    def load(self, refs: Sequence[Any], rows: Rows, smem: Sequence[Any], barrier: Any, head: Any) -> None:
        for ref, target in zip(refs, smem, strict=True):
            row_copies.load(ref, rows, target, barrier, after=(head,))

    def query_rows(self, tile: Any, wg: Any) -> Rows:
        """The queries of a consumer."""
        return Rows(tile * NUM_CONSUMERS + wg, self.tiles.block_q, self.tiles.block_q)

    # Consumers

    def take_turns(self) -> None:
        """Hands the tensor cores to the other consumer when that asks for them."""
        self.plgpu.barrier_arrive(self.turn.at[0])
        self.plgpu.barrier_wait(self.turn.at[0])

    def consume(self, wg: Any, tile: Any, origin: Any, num_chunks: Any, whole: tuple[Any, Any]) -> None:
        plgpu, block_q, dtype = self.plgpu, self.tiles.block_q, self.out_refs[0].dtype
        by_row = plgpu.Layout.WGMMA.reduce(1)
        rows = self.query_rows(tile, wg)
        q_smem = [smem.at[wg] for smem in self.q_smem]
        start_M, end_M = (
            plgpu.load(ref.at[rows.slice()], layout=by_row, optimized=False) for ref in (self.start_ref, self.end_ref)
        )
        pl.when(num_chunks > 0)(lambda: plgpu.barrier_wait(self.k_full.at[0]))
        plgpu.barrier_wait(self.q_full.at[wg])
        pl.when(wg == 1)(self.take_turns)
        carry = (
            tuple(
                plgpu.layout_cast(jnp.zeros((block_q, ref.shape[2]), jnp.float32), plgpu.Layout.WGMMA) for ref in self.q_refs
            ),
            plgpu.layout_cast(jnp.full((block_q,), MASKED, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), by_row),
        )
        step = functools.partial(self.step, wg, q_smem, start_M, end_M, origin, num_chunks)
        begin, stop = (jnp.minimum(x, num_chunks) for x in whole)
        carry = lax.fori_loop(0, begin, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(begin, stop, functools.partial(step, masked=False), carry)
        accs, _, sum_M = lax.fori_loop(stop, num_chunks, functools.partial(step, masked=True), carry)
        pl.when(wg == 0)(self.take_turns)

        inverse_M = jnp.where(end_M > 0, 1.0 / jnp.where(sum_M == 0.0, 1.0, sum_M), 0.0)
        for acc_Md, smem in zip(accs, q_smem, strict=True):
            smem[...] = (acc_Md * lax.broadcast_in_dim(inverse_M, acc_Md.shape, [0])).astype(dtype)
        plgpu.commit_smem()
        for smem, ref in zip(q_smem, self.out_refs, strict=True):
            row_copies.store(smem, ref, rows, after=(lax.axis_index("head"),))
        plgpu.wait_smem_to_gmem(0)

    def step(
        self,
        wg: Any,
        q_smem: list[Any],
        start_M: Any,
        end_M: Any,
        origin: Any,
        num_chunks: Any,
        chunk: Any,
        carry: Any,
        *,
        masked: bool,
    ) -> Any:
        """One chunk of keys: scores, softmax in base 2, values. On entry the keys are there and it is this consumer's turn."""
        plgpu, tiles = self.plgpu, self.tiles
        accs, max_M, sum_M = carry
        slot = self.slot(chunk)

        def multiply_keys(acc_ref: Any) -> Any:
            for q, k in zip(q_smem, self.k_smem, strict=True):
                plgpu.wgmma(acc_ref, q, k.at[slot].transpose((1, 0)))
            self.take_turns()
            return acc_ref[...]

        scores_Mk = pl.run_scoped(multiply_keys, plgpu.ACC((tiles.block_q, tiles.block_kv), jnp.float32))
        plgpu.barrier_arrive(self.k_free.at[slot])

        left_scale = self.score_scale
        if masked:
            # Scaled before the mask: a masked score must equal a masked maximum exactly.
            left_scale = 1.0
            key_Mk = plgpu.broadcasted_iota(jnp.int32, scores_Mk.shape, 1, layout=plgpu.Layout.WGMMA)
            key_Mk = key_Mk + (origin * TILE_ROWS + chunk * tiles.block_kv)
            from_Mk, to_Mk = (lax.broadcast_in_dim(x, scores_Mk.shape, [0]) for x in (start_M, end_M))
            scores_Mk = jnp.where((key_Mk >= from_Mk) & (key_Mk < to_Mk), scores_Mk * self.score_scale, MASKED)
        new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1) * left_scale)
        shrink_M = jnp.exp2(max_M - new_max_M)
        weights_Mk = jnp.exp2(scores_Mk * left_scale - lax.broadcast_in_dim(new_max_M, scores_Mk.shape, [0]))
        accs = tuple(acc_Md * lax.broadcast_in_dim(shrink_M, acc_Md.shape, [0]) for acc_Md in accs)
        sum_M = sum_M * shrink_M + weights_Mk.sum(axis=1)
        low_Mk = weights_Mk.astype(self.out_refs[0].dtype)
        accs, sum_M, new_max_M, low_Mk = lax.optimization_barrier((accs, sum_M, new_max_M, low_Mk))

        plgpu.barrier_arrive(self.turn.at[0])
        plgpu.barrier_wait(self.v_full.at[slot])
        plgpu.barrier_wait(self.turn.at[0])

        def wait_for_next_keys() -> None:
            pl.when(chunk + 1 < num_chunks)(lambda: plgpu.barrier_wait(self.k_full.at[self.slot(chunk + 1)]))

        accs = self.multiply_values(wg, accs, low_Mk, [smem.at[slot] for smem in self.v_smem], wait_for_next_keys)
        plgpu.barrier_arrive(self.v_free.at[slot])
        return accs, new_max_M, sum_M

    def multiply_values(self, wg: Any, accs: Any, weights_Mk: Any, v_smem: list[Any], meanwhile: Any) -> Any:
        """acc + weights @ values, of each part, with `meanwhile` called while it runs.

        The interpreter knows neither operand in registers.
        """
        plgpu = self.plgpu
        if self.p_smem is None:

            def multiply(acc_refs: Any) -> None:
                for acc_ref, v in zip(acc_refs, v_smem, strict=True):
                    plgpu.wgmma(acc_ref, weights_Mk, v)
                meanwhile()

            return pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in accs))
        p_smem = self.p_smem.at[wg]
        p_smem[...] = weights_Mk
        plgpu.commit_smem()
        meanwhile()
        return tuple(_compat.add_wgmma(acc, p_smem, v, interpret=True) for acc, v in zip(accs, v_smem, strict=True))
