"""The compute warpgroup of the Mosaic decode kernel: attention of an item's queries over its tiles, see `mosaic_decode`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_copies
from pallas_kernels._compat import add_wgmma, load_smem
from pallas_kernels.paged_attention import cta_workers, eight_bits
from pallas_kernels.paged_attention.mosaic_plan import Item
from pallas_kernels.paged_attention.triton_decode import cap_scores
from pallas_kernels.row_copies import Rows

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a difference of two maxima is never NaN
LAYOUT = plgpu.Layout.WGMMA
CHUNK = 64  # numbers of a row that pass through registers at once


@dataclass(frozen=True)
class Consumer:
    """Attention of the queries of items over their tiles."""

    out_ref: Any
    partial_ref: Any
    lse_ref: Any
    sinks_ref: Any  # None: there are none
    smem: dict[str, Any]
    find_worker: Callable[[], jax.Array]
    num_groups: int
    num_queries: int
    score_scale: Any
    value_scale: Any
    soft_cap: float | None
    window: int | None
    interpret: bool

    @property
    def is_narrow(self) -> bool:
        """Whether keys and values have 8 bits."""
        return jnp.dtype(self.smem["k"].dtype).itemsize == 1

    @property
    def widens_in_registers(self) -> bool:
        """Whether products take tiles in 8 bits: where they are interpreted, tiles are widened before."""
        return self.is_narrow and not self.interpret

    def attend(self, item: Item, carry):
        """The results of an item. carry: items and tiles before it."""
        num_items, num_tiles = carry
        padded_lines = self.smem["q"].shape[1]
        _, block_k, head_dim = self.smem["k"].shape
        first_position = self.first_position(item)
        slot = lax.rem(num_items, jnp.int32(2))
        plgpu.barrier_wait(self.smem["q_full"].at[slot])
        q_ref = self.queries(slot)
        state = (
            plgpu.layout_cast(jnp.zeros((head_dim, padded_lines), jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((padded_lines,), MASKED, jnp.float32), LAYOUT.reduce(0)),
            plgpu.layout_cast(jnp.zeros((block_k, padded_lines), jnp.float32), LAYOUT),
        )
        body = functools.partial(self.add_tile, item, first_position, q_ref, num_tiles)
        acc_HN, max_N, sum_kN = lax.fori_loop(0, item.num_tiles, body, state)
        plgpu.barrier_arrive(self.smem["q_free"].at[slot])
        sum_N = self.over_keys("add", sum_kN)
        if self.sinks_ref is not None:
            # Of a part, the combination adds it.
            sink_N = plgpu.load(self.sinks_ref, (item.head,), layout=LAYOUT.reduce(0), optimized=False) * LOG2E
            sum_N += jnp.where(item.is_first & item.is_last, jnp.exp2(sink_N - max_N), 0.0)
        acc_HN = acc_HN * lax.broadcast_in_dim(self.value_scale / sum_N, acc_HN.shape, [1])
        self.store(item, acc_HN, max_N, sum_N)
        return num_items + 1, num_tiles + item.num_tiles

    def queries(self, slot):
        """An item's queries in the form that products take."""
        q_ref = self.smem["q"].at[slot]
        if "wide_q" not in self.smem:
            return q_ref
        loaded_ref, q_ref = q_ref, self.smem["wide_q"]
        if self.widens_in_registers:
            eight_bits.store_queries(loaded_ref, q_ref)
        else:
            # The rows lie without tiles, in the same banks: it is once an item.
            q_HN = plgpu.load(loaded_ref.transpose((1, 0)), (), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
            q_ref.transpose((1, 0))[...] = q_HN.astype(jnp.float32).astype(q_ref.dtype) if self.is_narrow else q_HN
        plgpu.commit_smem()
        return q_ref

    def add_tile(self, item: Item, first_position, q_ref, num_before, index, state):
        """The state behind another tile of an item. num_before: tiles before those of the item."""
        acc_HN, max_N, sum_kN = state
        num_stages, block_k, _ = self.smem["k"].shape
        stage = lax.rem(num_before + index, jnp.int32(num_stages))
        start = (item.tile + index) * block_k

        plgpu.barrier_wait(self.smem["k_full"].at[stage])
        k_ref = self.tile("k", stage)
        multiply = functools.partial(self.multiply_keys, k_ref=k_ref, q_ref=q_ref)
        scores_kN = pl.run_scoped(multiply, plgpu.ACC((block_k, q_ref.shape[0]), jnp.float32)) * self.score_scale
        plgpu.barrier_arrive(self.smem["k_free"].at[stage])
        if self.soft_cap is not None:
            scores_kN = cap_scores(scores_kN, self.soft_cap)
        scores_kN = jnp.where(self.is_visible_to_each(item, first_position, start, scores_kN.shape), scores_kN, MASKED)
        new_max_N = jnp.maximum(max_N, self.over_keys("max", scores_kN))
        weights_kN = jnp.exp2(scores_kN - lax.broadcast_in_dim(new_max_N, scores_kN.shape, [1]))
        shrink_N = jnp.exp2(max_N - new_max_N)
        sum_kN = sum_kN * lax.broadcast_in_dim(shrink_N, sum_kN.shape, [1]) + weights_kN
        acc_HN = acc_HN * lax.broadcast_in_dim(shrink_N, acc_HN.shape, [1])
        store_transposed(self.smem["p"], weights_kN)

        plgpu.barrier_wait(self.smem["v_full"].at[stage])
        v_ref = self.tile("v", stage)
        if not self.is_narrow:  # what is widened is no NaN
            clear = functools.partial(self.clear_hidden_values, item, first_position, start, v_ref)
            pl.when((start < first_position) | (start + block_k > item.length))(clear)
        plgpu.commit_smem()
        acc_HN = self.add_values(acc_HN, v_ref)
        plgpu.barrier_arrive(self.smem["v_free"].at[stage])
        return acc_HN, new_max_N, sum_kN

    def tile(self, name: str, stage):
        """A tile in the form that products take: where they are interpreted, 8-bit numbers are widened first."""
        ref = self.smem[name].at[stage]
        return eight_bits.widen(ref, self.smem["wide"]) if "wide" in self.smem else ref

    def first_position(self, item: Item):
        """Position of the first key that any query of an item sees."""
        if self.window is None:
            return jnp.int32(0)
        return jnp.maximum(item.length - (self.window + self.num_queries - 1), 0)

    def is_visible_to_each(self, item: Item, first_position, start, shape):
        """[k, N]: whether each query sees a key."""
        if self.num_queries == 1:
            position_kN = start + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT)
            return (position_kN >= first_position) & (position_kN < item.length)
        query_kN = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT), jnp.int32(self.num_groups))
        # From the query's own position back, shifted by a constant of the tile.
        ahead_kN = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT) - query_kN
        end = item.length - (self.num_queries - 1) - start
        return ahead_kN < end if self.window is None else (ahead_kN < end) & (ahead_kN >= end - self.window)

    def clear_hidden_values(self, item: Item, first_position, start, v_ref) -> None:
        """Set values of keys that no query sees to zero: a NaN there would stay one under a weight of zero."""
        block_k, head_dim = v_ref.shape
        position_kc = start + plgpu.broadcasted_iota(jnp.int32, (block_k, CHUNK), 0, layout=LAYOUT)
        for column in range(0, head_dim, CHUNK):
            chunk_ref = v_ref.at[:, pl.ds(column, CHUNK)]
            v_kc = load_smem(chunk_ref, LAYOUT)
            is_visible_kc = (position_kc >= first_position) & (position_kc < item.length)
            chunk_ref[...] = jnp.where(is_visible_kc, v_kc, jnp.zeros_like(v_kc))

    def multiply_keys(self, acc_ref, k_ref, q_ref):
        """S^T of a tile."""
        if not self.widens_in_registers:
            plgpu.wgmma(acc_ref, k_ref, q_ref.transpose((1, 0)))
            return acc_ref[...]
        for key in range(0, k_ref.shape[0], eight_bits.BLOCK):
            plgpu.wgmma(acc_ref.at[pl.ds(key, eight_bits.BLOCK)], eight_bits.keys(k_ref, key), q_ref.transpose((1, 0)))
            plgpu.wgmma_wait(0)  # its registers are those of the next block
        return acc_ref[...]

    def add_values(self, acc_HN, v_ref):
        """O^T with a tile's values, under the weights in smem["p"]."""
        if not self.widens_in_registers:
            return add_wgmma(acc_HN, v_ref.transpose((1, 0)), self.smem["p"].transpose((1, 0)), interpret=self.interpret)

        def multiply(acc_ref):
            for key in range(0, v_ref.shape[0], eight_bits.BLOCK):
                weights_ref = self.smem["p"].at[:, pl.ds(key, eight_bits.BLOCK)]
                plgpu.wgmma(acc_ref, eight_bits.values(v_ref, key), weights_ref.transpose((1, 0)))
                plgpu.wgmma_wait(0)

        return pl.run_state(multiply)(plgpu.ACC.init(acc_HN))

    def over_keys(self, operation: str, x_kN):
        """The largest of the keys' numbers, or their sum."""
        if self.interpret or "reduced" not in self.smem:
            return x_kN.max(axis=0) if operation == "max" else x_kN.sum(axis=0)
        return cta_workers.reduce_rows(operation, x_kN, self.smem["reduced"])

    def store(self, item: Item, acc_HN, max_N, sum_N) -> None:
        """A whole row and head goes to the result, a part with its softmax sum to its place for the combination."""
        smem, num_queries = self.smem, self.num_queries
        store = eight_bits.store_result if self.widens_in_registers else store_transposed
        is_whole, groups = item.is_first & item.is_last, Rows(0, self.num_groups, self.num_groups)
        num_lines = num_queries * self.num_groups
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffers still hold what the item before stores

        @pl.when(is_whole)
        def _store_whole():
            store(smem["out"], acc_HN)
            plgpu.commit_smem()
            for query in range(num_queries):
                token = item.row if num_queries == 1 else item.row * num_queries + query
                lines = smem["out"].at[pl.ds(query * self.num_groups, self.num_groups)]
                row_copies.store(lines, self.out_ref, groups, before=(token, item.head))

        @pl.when(jnp.logical_not(is_whole))
        def _store_part():
            part = 2 * self.find_worker() + item.is_first.astype(jnp.int32)
            store(smem["partial"], acc_HN)
            plgpu.commit_smem()
            lines = Rows(0, num_lines, num_lines)
            row_copies.store(smem["partial"].at[pl.ds(0, num_lines)], self.partial_ref, lines, before=(part,))
            self.lse_ref.at[part][...] = max_N + jnp.log2(sum_N)


def store_transposed(ref, x: jax.Array) -> None:
    """ref = x.T; pairs of neighbours change lanes first, so that they are neighbours in memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
