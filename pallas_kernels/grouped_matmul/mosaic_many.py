"""A grouped product for Pallas Mosaic GPU (Hopper): tiles of sorted rows, each with the weights of its expert.

    warpgroup 0, 1  (consumers)   64 rows each of a tile of 128, all of its columns; those of gate and of up side by side
    warpgroup 2     (producer)    TMA copies of rows [128, 64] and weights [columns, 64] into a ring of shared memory

                        gate: columns    up: the same columns
    rows 0 ... 63      [ warpgroup 0   |                    ]   --activation-->  [64, columns] in shared memory  --TMA-->  out
    rows 64 ... 127    [ warpgroup 1   |                    ]   (skipped where the tile has no more than 64 rows)

A CTA per core stays for the whole launch and walks through work items (tile x block of columns), blocks of columns first, so that
CTAs that run at a time share rows and weights in the cache. The producer runs ahead into the next item. A tile's rows begin at a
multiple of 8, the rows of a swizzle tile (see `row_copies`); past its last row it reads what belongs to the next expert, which is
computed and not stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat, producer_consumer, row_copies
from pallas_kernels.grouped_matmul.triton_rows import SortedRows
from pallas_kernels.row_copies import Rows

NUM_CONSUMERS = 2
BLOCK_M = 64
TILE_ROWS = NUM_CONSUMERS * BLOCK_M
BLOCK_K = 64  # a row of 128 bytes, the swizzle
SWIZZLE_BYTES = 128
ALIGNMENT = 8  # rows of a swizzle tile
SMEM_BYTES = 227 << 10


@dataclass(frozen=True)
class Sizes:
    """Columns of a work item of each of the matrices, and stages of the ring."""

    columns: int
    num_stages: int = 4

    def smem_bytes(self, num_matrices: int) -> int:
        ring = self.num_stages * (TILE_ROWS + num_matrices * self.columns) * BLOCK_K
        return 2 * (ring + NUM_CONSUMERS * 2 * BLOCK_M * 64) + 1024  # barriers and alignment


def pick_sizes(num_columns: int, num_matrices: int) -> Sizes:
    """The widest blocks of columns that divide them, of multiples of 64."""
    wanted = (256, 192, 128, 64) if num_matrices == 1 else (128, 96, 64)
    return Sizes(next(columns for columns in wanted if num_columns % columns == 0))


def grouped_product(
    x_SK: jax.Array,
    weight_EAFK: jax.Array,
    bias_EAF: jax.Array | None,
    plan: SortedRows,
    combine: Callable[..., jax.Array],
    *,
    sizes: Sizes,
    interpret: Any = False,
) -> jax.Array:
    """[S, F]: combine(x @ weight[expert, a].T + bias[expert, a] for each a) of the rows of the plan's tiles.

    S is a multiple of 8 and at least TILE_ROWS, K of BLOCK_K. combine is called with float32 arrays, one for each of A matrices.
    Rows that belong to no tile are undefined.
    """
    plgpu = _compat.mosaic()
    num_rows, num_terms = x_SK.shape
    num_experts, num_matrices, num_columns, _ = weight_EAFK.shape
    assert num_rows % ALIGNMENT == 0 and num_rows >= TILE_ROWS, f"{num_rows} rows"
    assert num_terms % BLOCK_K == 0 and num_columns % sizes.columns == 0, f"{num_terms} terms, {num_columns} columns, {sizes}"
    num_ctas = 2 if interpret else _compat.num_cores()
    dtype = x_SK.dtype
    store_width = 64 if sizes.columns % 64 == 0 else 32

    def tiled(*shape: int) -> Any:
        width = shape[-1]
        return plgpu.SMEM(
            shape, dtype, transforms=(plgpu.TilingTransform((ALIGNMENT, width)), plgpu.SwizzleTransform(width * dtype.itemsize))
        )

    scratch = {
        "x_smem": tiled(sizes.num_stages, TILE_ROWS, BLOCK_K),
        "weight_smem": tiled(sizes.num_stages, num_matrices * sizes.columns, BLOCK_K),
        "out_smem": tiled(NUM_CONSUMERS, 2, BLOCK_M, store_width),
        "full": plgpu.Barrier(num_arrivals=1 + num_matrices, num_barriers=sizes.num_stages),
        "free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=sizes.num_stages),
    }
    biases = () if bias_EAF is None else (bias_EAF,)

    def body(x_ref, weight_ref, *refs):
        bias_refs, (expert_ref, start_ref, count_ref, num_tiles_ref, out_ref, *rest) = refs[: len(biases)], refs[len(biases) :]
        _Product(
            plgpu=plgpu,
            sizes=sizes,
            combine=combine,
            num_ctas=num_ctas,
            interpret=bool(interpret),
            x_ref=x_ref,
            weight_ref=weight_ref,
            bias_ref=bias_refs[0] if bias_refs else None,
            expert_ref=expert_ref,
            start_ref=start_ref,
            count_ref=count_ref,
            num_tiles_ref=num_tiles_ref,
            out_ref=out_ref,
            **dict(zip(scratch, rest, strict=True)),
        ).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_columns), dtype),
        scratch_types=list(scratch.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        # Reads out of bounds give NaN.
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized"),
    )(x_SK, weight_EAFK, *biases, plan.expert_N, plan.start_N, plan.count_N, plan.num_tiles[None])


@dataclass(frozen=True)
class _Product:
    """The kernel's references and sizes. Every barrier's phases are waited for one by one, by each of its waiters."""

    plgpu: Any
    sizes: Sizes
    combine: Callable[..., jax.Array]
    num_ctas: int
    interpret: bool
    x_ref: Any  # [S, K]
    weight_ref: Any  # [E, A, F, K]
    bias_ref: Any  # [E, A, F] or None
    expert_ref: Any  # [N]
    start_ref: Any  # [N]
    count_ref: Any  # [N]
    num_tiles_ref: Any  # [1]
    out_ref: Any  # [S, F]
    x_smem: Any  # [stages, 128, BLOCK_K]
    weight_smem: Any  # [stages, A * columns, BLOCK_K]
    out_smem: Any  # [consumers, 2, 64, width]
    full: Any
    free: Any

    def run(self) -> None:
        producer_consumer.run(NUM_CONSUMERS, self.consume, self.produce)

    @property
    def num_steps(self) -> int:
        """Stages that an item takes."""
        return self.x_ref.shape[1] // BLOCK_K

    @property
    def num_blocks(self) -> int:
        """Blocks of columns."""
        return self.out_ref.shape[1] // self.sizes.columns

    def num_my_items(self) -> jax.Array:
        num_items = self.num_tiles_ref[0] * self.num_blocks
        return lax.div(num_items - lax.axis_index("cta") + (self.num_ctas - 1), self.num_ctas)

    def item(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile and block of columns of a CTA's item."""
        index = turn * self.num_ctas + lax.axis_index("cta")
        return lax.div(index, self.num_blocks), lax.rem(index, self.num_blocks)

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, self.sizes.num_stages)

    # Producer

    def produce(self) -> None:
        num_items, stages = self.num_my_items(), self.sizes.num_stages

        @pl.loop(0, num_items)
        def _(turn):
            tile, block = self.item(turn)
            expert, start = self.expert_ref[tile], self.start_ref[tile]
            count = self.count_ref[tile]
            columns = Rows(block, self.sizes.columns, self.sizes.columns)

            @pl.loop(0, self.num_steps)
            def _(k):
                step = turn * self.num_steps + k
                slot, terms = self.slot(step), pl.ds(k * BLOCK_K, BLOCK_K)
                pl.when(step >= stages)(lambda: self.plgpu.barrier_wait(self.free.at[slot]))
                for size, is_size in ((BLOCK_M, count <= BLOCK_M), (TILE_ROWS, count > BLOCK_M)):

                    @pl.when(is_size)
                    def _(size=size):
                        rows = Rows(lax.div(start, ALIGNMENT), ALIGNMENT, size)
                        target = self.x_smem.at[slot, pl.ds(0, size)]
                        row_copies.load(self.x_ref, rows, target, self.full.at[slot], after=(terms,))

                for matrix in range(self.weight_ref.shape[1]):
                    target = self.weight_smem.at[slot, pl.ds(matrix * self.sizes.columns, self.sizes.columns)]
                    row_copies.load(
                        self.weight_ref, columns, target, self.full.at[slot], before=(expert, matrix), after=(terms,)
                    )

        # What the consumers still release must have arrived before the barriers go.
        end = num_items * self.num_steps

        @pl.loop(jnp.maximum(end - stages, 0), end)
        def _(step):
            self.plgpu.barrier_wait(self.free.at[self.slot(step)])

    # Consumers

    def consume(self, wg: jax.Array) -> None:
        @pl.loop(0, self.num_my_items())
        def _(turn):
            tile, block = self.item(turn)
            count = jnp.clip(self.count_ref[tile] - wg * BLOCK_M, 0, BLOCK_M)

            @pl.when(count > 0)
            def _():
                sums = self.multiply(wg, turn)
                self.finish(wg, sums, self.expert_ref[tile], self.start_ref[tile] + wg * BLOCK_M, block, count)

            @pl.when(count == 0)
            def _():
                @pl.loop(0, self.num_steps)
                def _(k):
                    slot = self.slot(turn * self.num_steps + k)
                    self.plgpu.barrier_wait(self.full.at[slot])
                    self.plgpu.barrier_arrive(self.free.at[slot])

        self.plgpu.wait_smem_to_gmem(0)

    def multiply(self, wg: jax.Array, turn: jax.Array) -> jax.Array:
        """float32 [64, A * columns]: this consumer's rows of an item."""
        plgpu = self.plgpu
        first = turn * self.num_steps

        def accumulate(sum_ref: Any) -> jax.Array:
            @pl.loop(0, self.num_steps)
            def _(k):
                slot = self.slot(first + k)
                plgpu.barrier_wait(self.full.at[slot])
                x_smem = self.x_smem.at[slot, pl.ds(wg * BLOCK_M, BLOCK_M)]
                plgpu.wgmma(sum_ref, x_smem, self.weight_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the step before has been read
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(self.free.at[self.slot(first + k - 1)]))

            return sum_ref[...]

        columns = self.weight_ref.shape[1] * self.sizes.columns
        sums = pl.run_scoped(accumulate, plgpu.ACC((BLOCK_M, columns), jnp.float32))
        plgpu.barrier_arrive(self.free.at[self.slot(first + self.num_steps - 1)])
        return sums

    def finish(
        self, wg: jax.Array, sums: jax.Array, expert: jax.Array, row: jax.Array, block: jax.Array, count: jax.Array
    ) -> None:
        """Bias, combination and store of rows of a consumer, `row` the first of them; part by part of the columns."""
        plgpu = self.plgpu
        columns, width = self.sizes.columns, self.out_smem.shape[3]
        for part, left in enumerate(range(0, columns, width)):
            values = []
            for matrix in range(self.weight_ref.shape[1]):
                value = sums[:, matrix * columns + left : matrix * columns + left + width]
                if self.bias_ref is not None:
                    source = self.bias_ref.at[expert, matrix, pl.ds(block * columns + left, width)]
                    bias = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False).astype(jnp.float32)
                    value = value + lax.broadcast_in_dim(bias, value.shape, [1])
                values.append(value)
            staging = self.out_smem.at[wg, part % 2]
            # The last store of the item before may come from either place.
            plgpu.wait_smem_to_gmem(min(part, 1), wait_read_only=True)
            staging[...] = self.combine(*values).astype(self.out_ref.dtype)
            plgpu.commit_smem()
            self.store(staging, row, pl.ds(block * columns + left, width), count)

    def store(self, staging: Any, row: jax.Array, columns: Any, count: jax.Array) -> None:
        """Writes the first rows: all at once, or in runs of powers of two. A run may end in the room up to the next expert's rows."""

        @pl.when(count == BLOCK_M)
        def _():
            row_copies.store(staging, self.out_ref, Rows(lax.div(row, ALIGNMENT), ALIGNMENT, BLOCK_M), after=(columns,))

        @pl.when(count < BLOCK_M)
        def _():
            aligned = lax.div(count + (ALIGNMENT - 1), ALIGNMENT) * ALIGNMENT
            size = BLOCK_M
            while size >= ALIGNMENT:
                offset = aligned & ~(2 * size - 1)  # longer runs come first

                @pl.when((aligned & size) != 0)
                def _(size=size, offset=offset):
                    run = Rows(lax.div(row + offset, ALIGNMENT), ALIGNMENT, size)
                    row_copies.store(staging.at[pl.ds(offset, size)], self.out_ref, run, after=(columns,))

                size //= 2
