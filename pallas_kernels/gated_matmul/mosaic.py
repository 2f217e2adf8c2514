"""Gate, up and the activation of many tokens in one kernel, by Pallas Mosaic GPU (Hopper): bound by the tensor cores.

    warpgroup 0, 1  (consumers)   64 tokens each of a tile of 128: COLUMNS outputs of gate, and the same of up
    warpgroup 2     (producer)    TMA copies of tokens [128, 64] and of both weights [64, COLUMNS] into a ring of shared memory

The two CTAs of a cluster, on two cores, compute the same outputs of neighbouring tiles of tokens: each reads a half of the weights and
sends it to both, because what a core reads from the cache would take longer than its products. They stay for the whole launch and walk
through items in a snake, so that CTAs that run at a time share tokens and weights in the cache. What lies outside of an array a copy
fills with zeros, or does not write.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import _compat, producer_consumer, row_copies
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.row_copies import Rows

NUM_CONSUMERS = 2
BLOCK_M = 64
TILE_ROWS = NUM_CONSUMERS * BLOCK_M
BLOCK = 64
"""Inputs of a step, and outputs of a store: 128 bytes, the swizzle."""
COLUMNS = 128
"""Outputs of an item, of gate and of up."""
NUM_CTAS = 2
"""CTAs of a cluster."""
NUM_STAGES = 4
SNAKE_WIDTH = 8
"""Pairs of tiles of tokens. With 4, 8 and 16 8192 tokens of Llama-3.1-8B take 2857, 2821 and 2946 us on an H200."""
SWIZZLE_ROWS = 8


def supports(*, platform: str, dtype: DTypeLike, width: int, hidden: int, interpret: bool = False) -> bool:
    """16-bit floats, and widths that tiles divide: more than one tile of outputs, see `product`."""
    return (
        (platform == "gpu" or interpret)
        and _compat.has_mosaic()
        and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        and width % BLOCK == 0
        and hidden % BLOCK == 0
        and hidden > BLOCK
    )


def product(x_TD: jax.Array, weight_D2F: jax.Array, *, activation: str, interpret: Any = False) -> jax.Array:
    """See the folder."""
    # A copy leaves out a dimension in which an array has one tile, and with it what begins past that tile: two or more in each.
    padding = max(-len(x_TD) % SWIZZLE_ROWS, 2 * SWIZZLE_ROWS - len(x_TD))
    padded_TD = jnp.pad(x_TD, ((0, padding), (0, 0))) if padding else x_TD
    return _product(padded_TD, weight_D2F, activation, interpret)[: len(x_TD)]


def _product(x_TD: jax.Array, weight_D2F: jax.Array, activation: str, interpret: Any) -> jax.Array:
    """Of whole tiles of the swizzle, at least two."""
    plgpu = _compat.mosaic()
    num_tokens, num_columns = len(x_TD), weight_D2F.shape[2]
    dtype = x_TD.dtype
    num_clusters = (2 if interpret else _compat.num_cores()) // NUM_CTAS

    def tiled(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((SWIZZLE_ROWS, BLOCK)), plgpu.SwizzleTransform(BLOCK * dtype.itemsize)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    scratch = {
        "x_smem": tiled(NUM_STAGES, TILE_ROWS, BLOCK),
        "weight_smem": tiled(NUM_STAGES, 2, BLOCK, COLUMNS),
        "out_smem": tiled(NUM_CONSUMERS, 2, BLOCK_M, BLOCK),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=NUM_STAGES),
        "free": plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=NUM_CONSUMERS, num_barriers=NUM_STAGES),
    }

    def body(x_ref: Any, weight_ref: Any, out_ref: Any, *refs: Any) -> None:
        smem = dict(zip(scratch, refs, strict=True))
        _Product(plgpu, ACTIVATIONS[activation], num_clusters, x_ref, weight_ref, out_ref, **smem).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_columns), dtype),
        scratch_types=list(scratch.values()),
        grid=(num_clusters,),
        grid_names=("cluster",),
        cluster=(NUM_CTAS,),
        cluster_names=("member",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"),
    )(x_TD, weight_D2F)


@dataclass(frozen=True)
class _Product:
    """The kernel's references and sizes. Every barrier's phases are waited for one by one, by each of its waiters."""

    plgpu: Any
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    num_clusters: int
    x_ref: Any  # [T, D]
    weight_ref: Any  # [D, 2, F]
    out_ref: Any  # [T, F]
    x_smem: Any  # [stages, TILE_ROWS, BLOCK]
    weight_smem: Any  # [stages, 2, BLOCK, COLUMNS]
    out_smem: Any  # [consumers, 2, BLOCK_M, BLOCK]
    full: Any
    free: Any
    """In both CTAs of a cluster."""

    def run(self) -> None:
        producer_consumer.run(NUM_CONSUMERS, self.consume, self.produce)

    @property
    def num_steps(self) -> int:
        """Stages that an item takes."""
        return self.x_ref.shape[1] // BLOCK

    @property
    def num_pairs(self) -> int:
        """Pairs of tiles of tokens."""
        return pl.cdiv(self.x_ref.shape[0], NUM_CTAS * TILE_ROWS)

    @property
    def num_blocks(self) -> int:
        """Blocks of outputs."""
        return pl.cdiv(self.out_ref.shape[1], COLUMNS)

    def num_my_items(self) -> jax.Array:
        """Number of items of each CTA of a cluster."""
        num_items = self.num_pairs * self.num_blocks
        return lax.div(num_items - lax.axis_index("cluster") + (self.num_clusters - 1), self.num_clusters)

    def item(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile of tokens and block of outputs of this CTA's item."""
        index = turn * self.num_clusters + lax.axis_index("cluster")
        width = min(SNAKE_WIDTH, self.num_pairs)
        pair, block = self.plgpu.planar_snake(index, (self.num_pairs, self.num_blocks), 0, width)
        return pair * NUM_CTAS + lax.axis_index("member"), block

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, NUM_STAGES)

    # Producer

    def produce(self) -> None:
        num_items = self.num_my_items()

        @pl.loop(0, num_items)
        def _(turn):
            tile, block = self.item(turn)

            @pl.loop(0, self.num_steps)
            def _(k):
                step = turn * self.num_steps + k
                pl.when(step >= NUM_STAGES)(lambda: self.plgpu.barrier_wait(self.free.at[self.slot(step)]))
                self.copy(self.slot(step), tile, block, k)

        # What the consumers still release must have arrived before the barriers go.
        end = num_items * self.num_steps

        @pl.loop(jnp.maximum(end - NUM_STAGES, 0), end)
        def _(step):
            self.plgpu.barrier_wait(self.free.at[self.slot(step)])

    def copy(self, slot: jax.Array, tile: jax.Array, block: jax.Array, k: jax.Array) -> None:
        """Begin to copy a step's tokens, and for both CTAs this one's half of the weights."""
        full, rows = self.full.at[slot], Rows(tile, TILE_ROWS, TILE_ROWS)
        row_copies.load(self.x_ref, rows, self.x_smem.at[slot], full, after=(pl.ds(k * BLOCK, BLOCK),))
        columns = pl.ds(block * COLUMNS, COLUMNS)
        for matrix in range(2):
            target, after = self.weight_smem.at[slot, matrix], (matrix, columns)
            row_copies.load(self.weight_ref, Rows(k, BLOCK, BLOCK), target, full, after=after, shared_by="member")

    # Consumers

    def consume(self, wg: jax.Array) -> None:
        @pl.loop(0, self.num_my_items())
        def _(turn):
            tile, block = self.item(turn)
            self.finish(wg, *self.multiply(wg, turn), Rows(tile * NUM_CONSUMERS + wg, BLOCK_M, BLOCK_M), block)

        self.plgpu.wait_smem_to_gmem(0)

    def multiply(self, wg: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32 [BLOCK_M, COLUMNS] of gate and of up: this consumer's tokens of an item."""
        plgpu, first = self.plgpu, turn * self.num_steps

        def accumulate(gate_ref: Any, up_ref: Any) -> tuple[jax.Array, jax.Array]:
            @pl.loop(0, self.num_steps)
            def _(k):
                slot = self.slot(first + k)
                plgpu.barrier_wait(self.full.at[slot])
                x_smem = self.x_smem.at[slot, pl.ds(wg * BLOCK_M, BLOCK_M)]
                plgpu.wgmma(gate_ref, x_smem, self.weight_smem.at[slot, 0])
                plgpu.wgmma(up_ref, x_smem, self.weight_smem.at[slot, 1])
                plgpu.wgmma_wait(2)  # the step before has been read
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(self.free.at[self.slot(first + k - 1)]))

            return gate_ref[...], up_ref[...]

        sums = plgpu.ACC((BLOCK_M, COLUMNS), jnp.float32)
        found = pl.run_scoped(accumulate, sums, sums)
        plgpu.barrier_arrive(self.free.at[self.slot(first + self.num_steps - 1)])
        return found

    def finish(self, wg: jax.Array, gate: jax.Array, up: jax.Array, rows: Rows, block: jax.Array) -> None:
        """Activation and store of a consumer's tokens, part by part of the outputs."""
        plgpu = self.plgpu
        for part in range(COLUMNS // BLOCK):
            staging, own = self.out_smem.at[wg, part % 2], slice(part * BLOCK, (part + 1) * BLOCK)
            # The last store of the item before may come from either place.
            plgpu.wait_smem_to_gmem(min(part, 1), wait_read_only=True)
            staging[...] = self.combine(gate[:, own], up[:, own]).astype(self.out_ref.dtype)
            plgpu.commit_smem()
            row_copies.store(staging, self.out_ref, rows, after=(pl.ds(block * COLUMNS + part * BLOCK, BLOCK),))
