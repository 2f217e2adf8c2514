"""Gate, up and the activation of many tokens in one kernel, by Pallas Mosaic GPU (Hopper): bound by the tensor cores.

    warpgroup 0, 1  (consumers)   64 tokens each of a tile of 128: COLUMNS outputs of gate, and the same of up
    warpgroup 2     (producer)    TMA copies of tokens and of both weights into a ring of shared memory, 128 bytes of a token a step

The two CTAs of a cluster, on two cores, compute the same outputs of neighbouring tiles of tokens: each reads a half of the weights and
sends it to both, because what a core reads from the cache would take longer than its products. They stay for the whole launch and walk
through items in a snake, so that CTAs that run at a time share tokens and weights in the cache. What lies outside of an array a copy
fills with zeros, or does not write. Operands in 8 bits have their inputs last, as the tensor cores take them; their scales are factors
of the sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import _compat, producer_consumer, row_copies
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.quantize.values import Quantized
from pallas_kernels.row_copies import Rows

NUM_CONSUMERS = 2
BLOCK_M = 64
TILE_ROWS = NUM_CONSUMERS * BLOCK_M
SWIZZLE_BYTES = 128
STORED = 64
"""Outputs of a store: the bytes of a swizzle."""
COLUMNS = 128
"""Outputs of an item, of gate and of up."""
NUM_CTAS = 2
"""CTAs of a cluster."""
NUM_STAGES = 4
SNAKE_WIDTH = 8
"""Pairs of tiles of tokens. With 4, 8 and 16 8192 tokens of Llama-3.1-8B take 2857, 2821 and 2946 us on an H200."""
SWIZZLE_ROWS = 8


def supports(
    *, platform: str, dtype: DTypeLike, width: int, hidden: int, is_scaled: bool = False, interpret: bool = False
) -> bool:
    """16-bit floats, and widths that tiles divide: more than one tile of outputs, see `product`."""
    is_here = (platform == "gpu" or interpret) and _compat.has_mosaic() and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if is_scaled:
        return is_here and width % SWIZZLE_BYTES == 0 and hidden % COLUMNS == 0
    return is_here and width % (SWIZZLE_BYTES // 2) == 0 and hidden % STORED == 0 and hidden > STORED


def product(x_TD: jax.Array, weight_D2F: jax.Array, *, activation: str, interpret: Any = False) -> jax.Array:
    """See the folder."""
    # A copy leaves out a dimension in which an array has one tile, and with it what begins past that tile: two or more in each.
    padding = max(-len(x_TD) % SWIZZLE_ROWS, 2 * SWIZZLE_ROWS - len(x_TD))
    return _product(_padded(x_TD, padding), weight_D2F, (), activation, x_TD.dtype, interpret)[: len(x_TD)]


def scaled_product(
    x: Quantized, values_2FD: jax.Array, scale_2F: jax.Array, *, activation: str, dtype: DTypeLike, interpret: Any = False
) -> jax.Array:
    """See the folder."""
    padding = -len(x) % (NUM_CTAS * TILE_ROWS)  # scales are read without regard to their end
    scales = _padded(x.scale_T, padding), scale_2F
    return _product(_padded(x.values_TN, padding), values_2FD, scales, activation, dtype, interpret)[: len(x)]


def _padded(x: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))) if padding else x


def _product(
    x_TD: jax.Array, weight: jax.Array, scales: tuple[jax.Array, ...], activation: str, dtype: DTypeLike, interpret: Any
) -> jax.Array:
    """weight: [D, 2, F], or with scales [2, F, D]."""
    plgpu = _compat.mosaic()
    num_tokens, num_columns = len(x_TD), weight.shape[1 if scales else 2]
    dtype, block = jnp.dtype(dtype), SWIZZLE_BYTES // x_TD.dtype.itemsize
    num_clusters = (2 if interpret else _compat.num_cores()) // NUM_CTAS

    def tiled(dtype: jnp.dtype, *shape: int) -> Any:
        tiling = plgpu.TilingTransform((SWIZZLE_ROWS, SWIZZLE_BYTES // dtype.itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(SWIZZLE_BYTES)))

    scratch = {
        "x_smem": tiled(x_TD.dtype, NUM_STAGES, TILE_ROWS, block),
        "weight_smem": tiled(weight.dtype, NUM_STAGES, 2, *((COLUMNS, block) if scales else (block, COLUMNS))),
        "out_smem": tiled(dtype, NUM_CONSUMERS, 2, BLOCK_M, STORED),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=NUM_STAGES),
        "free": plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=NUM_CONSUMERS, num_barriers=NUM_STAGES),
    }

    def body(x_ref: Any, weight_ref: Any, *refs: Any) -> None:
        scale_refs, (out_ref, *others) = refs[: len(scales)], refs[len(scales) :]
        smem = dict(zip(scratch, others, strict=True))
        _Product(plgpu, ACTIVATIONS[activation], num_clusters, x_ref, weight_ref, scale_refs, out_ref, **smem).run()

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
    )(x_TD, weight, *scales)


@dataclass(frozen=True)
class _Product:
    """The kernel's references and sizes. Every barrier's phases are waited for one by one, by each of its waiters."""

    plgpu: Any
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    num_clusters: int
    x_ref: Any  # [T, D]
    weight_ref: Any  # [D, 2, F], or with scales [2, F, D]
    scale_refs: tuple[Any, ...]  # [T] and [2, F], or none
    out_ref: Any  # [T, F]
    x_smem: Any  # [stages, TILE_ROWS, block]
    weight_smem: Any  # [stages, 2, block, COLUMNS], or with scales [stages, 2, COLUMNS, block]
    out_smem: Any  # [consumers, 2, BLOCK_M, STORED]
    full: Any
    free: Any
    """In both CTAs of a cluster."""

    def run(self) -> None:
        producer_consumer.run(NUM_CONSUMERS, self.consume, self.produce)

    @property
    def block(self) -> int:
        """Inputs of a step."""
        return self.x_smem.shape[2]

    @property
    def num_steps(self) -> int:
        """Stages that an item takes."""
        return self.x_ref.shape[1] // self.block

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
        inputs, outputs = Rows(k, self.block, self.block), Rows(block, COLUMNS, COLUMNS)
        row_copies.load(self.x_ref, rows, self.x_smem.at[slot], full, after=(inputs.slice(),))
        load = partial(row_copies.load, self.weight_ref, barrier=full, shared_by="member")
        for matrix in range(2):
            target = self.weight_smem.at[slot, matrix]
            if self.scale_refs:
                load(rows=outputs, target=target, before=(matrix,), after=(inputs.slice(),))
            else:
                load(rows=inputs, target=target, after=(matrix, outputs.slice()))

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
                for matrix, sum_ref in enumerate((gate_ref, up_ref)):
                    weight = self.weight_smem.at[slot, matrix]
                    plgpu.wgmma(sum_ref, x_smem, weight.transpose((1, 0)) if self.scale_refs else weight)
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
        for part in range(COLUMNS // STORED):
            staging, own = self.out_smem.at[wg, part % 2], slice(part * STORED, (part + 1) * STORED)
            outputs = pl.ds(block * COLUMNS + part * STORED, STORED)
            sums = [self.scaled(each[:, own], matrix, rows, outputs) for matrix, each in enumerate((gate, up))]
            # The last store of the item before may come from either place.
            plgpu.wait_smem_to_gmem(min(part, 1), wait_read_only=True)
            staging[...] = self.combine(*sums).astype(self.out_ref.dtype)
            plgpu.commit_smem()
            row_copies.store(staging, self.out_ref, rows, after=(outputs,))

    def scaled(self, sums: jax.Array, matrix: int, rows: Rows, outputs: Any) -> jax.Array:
        """A consumer's sums of these tokens and outputs, times their scales."""
        if not self.scale_refs:
            return sums
        plgpu, (row_scale_ref, scale_ref) = self.plgpu, self.scale_refs
        layout = plgpu.Layout.WGMMA
        of_rows = plgpu.load(row_scale_ref.at[rows.slice()], layout=layout.reduce(1), optimized=False)
        of_outputs = plgpu.load(scale_ref.at[matrix, outputs], layout=layout.reduce(0), optimized=False)
        return sums * lax.broadcast_in_dim(of_rows, sums.shape, [0]) * lax.broadcast_in_dim(of_outputs, sums.shape, [1])
