"""A grouped product with packed weights, by Pallas Mosaic GPU (Hopper): tiles of rows, each with the weights of its expert.

    warpgroups 0, 1  (consumers)   blocks of 64 outputs: one of gate and the same of up, or one or two of down
    warpgroup 2      (producer)    TMA copies of words, scales, zeros and x in steps of inputs, into a ring of shared memory

A CTA per core stays for the whole launch and walks through items (tile of rows x blocks of outputs), blocks first, so that CTAs that
run at a time share rows of x in the cache. The transposed product is computed, weight @ x.T, and transposed on its way through shared
memory. A tile of few rows is bound by reading weights: its steps are long, so that many bytes are in flight. With many rows a step is
two products: one of them is decoded while the tensor cores compute the other. What lies outside of an array a copy fills with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat, row_copies
from pallas_kernels.grouped_matmul.packed import PackedExperts
from pallas_kernels.grouped_matmul.triton_rows import SortedRows
from pallas_kernels.quantized_matmul.cta import PRODUCER_REGISTERS, RESERVED_BYTES, SMEM_BYTES, consumer_registers
from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, by_rows, of_tile, operand, word_rows
from pallas_kernels.quantized_matmul.packed import TILE
from pallas_kernels.row_copies import Rows

NUM_CONSUMERS = 2
ALIGNMENT = 8  # rows of a swizzle tile
OVERLAPPED = 2
"""Products of a step in which one is decoded while the other is computed. Registers that a product in flight still reads belong to the
other one: with another number they could be written again too early, which nothing reports (results are wrong)."""
_MAX_STAGES = 12
_FEW_ROWS = 16
_STEP_BYTES = 32 << 10
"""Of words, where a tile has few rows."""


@dataclass(frozen=True)
class Sizes:
    """Blocks of each matrix that a consumer computes, tiles of inputs of a step, and stages of the ring."""

    blocks: int
    step_tiles: int
    num_stages: int


def pick_sizes(tile_rows: int, weight: PackedExperts) -> Sizes:
    """Long steps for few rows, two products a step for many; as many stages as fit."""
    num_matrices = _num_matrices(weight)
    bits = DECODERS[weight.packed.number].bits
    if tile_rows > _FEW_ROWS * 2:
        blocks = OVERLAPPED // num_matrices
        step_tiles = 1
    else:
        blocks = 1
        step_tiles = min(4, _STEP_BYTES // (NUM_CONSUMERS * num_matrices * TILE * TILE * bits // 8))
        step_tiles = max(step_tiles, OVERLAPPED // num_matrices)
    products = num_matrices * blocks
    stage = NUM_CONSUMERS * products * step_tiles * TILE * TILE * bits // 8
    stage += sum(
        NUM_CONSUMERS * products * TILE * _num_groups(weight, step_tiles) * vector.dtype.itemsize
        for vector in _vectors(weight).values()
    )
    stage += 2 * tile_rows * TILE * step_tiles
    room = SMEM_BYTES - RESERVED_BYTES - 2 * NUM_CONSUMERS * blocks * tile_rows * TILE
    return Sizes(blocks, step_tiles, min(_MAX_STAGES, room // stage))


def _num_matrices(weight: PackedExperts) -> int:
    return weight.shape[1] if len(weight.shape) == 4 else 1


def _vectors(weight: PackedExperts) -> dict[str, jax.Array]:
    """The scale and the zero of groups that there are, by name: [E * A, groups, N]."""
    found = {name: vector for name in ("scale", "zero") if (vector := getattr(weight.packed, name)) is not None}
    return {name: vector.reshape(-1, *vector.shape[-2:]) for name, vector in found.items()}


def _group(weight: PackedExperts) -> int | None:
    return None if weight.num_groups is None else weight.shape[-1] // weight.num_groups


def _num_groups(weight: PackedExperts, step_tiles: int) -> int:
    """Groups that the inputs of a step belong to."""
    step = step_tiles * TILE
    return max(1, step // (_group(weight) or step))


def grouped_product(
    x_SK: jax.Array,
    weight: PackedExperts,
    bias: jax.Array | None,
    plan: SortedRows,
    combine: Callable[..., jax.Array],
    *,
    tile_rows: int,
    num_rows: int,
    is_shared: bool = False,
    sizes: Sizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """bfloat16 [num_rows, N]: combine(x @ weight[expert, a].T + bias[expert, a] for each a) of the rows of the plan's tiles.

    weight: [E, A, N, K], or [E, N, K] for A = 1. bias: [E, A, N] or [E, N]. combine is called with float32 arrays, one for each of A
    matrices. tile_rows: those of the plan, a multiple of 8. is_shared: every tile has the first rows of x. Rows that belong to no tile
    are undefined.
    """
    plgpu = _compat.mosaic()
    sizes = sizes or pick_sizes(tile_rows, weight)
    num_matrices, (*_, num_outputs, num_inputs) = _num_matrices(weight), weight.shape
    vectors = _vectors(weight)
    factor = weight.packed.factor
    by_output = {
        name: array.reshape(-1, num_outputs) for name, array in (("factor", factor), ("bias", bias)) if array is not None
    }
    num_ctas = 2 if interpret else _compat.num_cores()
    words = weight.packed.words
    rows_of_tile = word_rows(DECODERS[weight.packed.number].bits)
    words = words.reshape(-1, num_inputs // TILE * rows_of_tile, WORD_COLUMNS)
    products = num_matrices * sizes.blocks
    assert tile_rows % ALIGNMENT == 0 and x_SK.shape[1] == num_inputs, f"{tile_rows} rows of a tile, x {x_SK.shape}"
    assert products * sizes.step_tiles >= OVERLAPPED, f"{sizes} of {num_matrices} matrices"

    def swizzled(*shape: int) -> Any:
        transforms = (plgpu.TilingTransform((ALIGNMENT, TILE)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, x_SK.dtype, transforms=transforms)

    stages = sizes.num_stages
    ring = stages, NUM_CONSUMERS, products
    scratch = {
        "words_smem": plgpu.SMEM((*ring, sizes.step_tiles * rows_of_tile, WORD_COLUMNS), jnp.int32),
        "x_smem": swizzled(stages, tile_rows, sizes.step_tiles * TILE),
        "out_smem": swizzled(NUM_CONSUMERS, sizes.blocks, tile_rows, TILE),
        "full": plgpu.Barrier(num_arrivals=1 + NUM_CONSUMERS * products * (1 + len(vectors)), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
    }
    scratch |= {
        f"{name}_smem": plgpu.SMEM((*ring, _num_groups(weight, sizes.step_tiles), TILE), vector.dtype)
        for name, vector in vectors.items()
    }
    if interpret:
        scratch["interpreted_smem"] = plgpu.SMEM((NUM_CONSUMERS, TILE, TILE), x_SK.dtype)

    def body(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        of_groups, refs = refs[: len(vectors)], refs[len(vectors) :]
        of_outputs, refs = refs[: len(by_output)], refs[len(by_output) :]
        expert_ref, start_ref, count_ref, num_tiles_ref, out_ref, *others = refs
        _Grouped(
            plgpu=plgpu,
            number=weight.packed.number,
            group=_group(weight),
            num_matrices=num_matrices,
            tile_rows=tile_rows,
            is_shared=is_shared,
            sizes=sizes,
            combine=combine,
            num_ctas=num_ctas,
            num_steps=pl.cdiv(num_inputs // TILE, sizes.step_tiles),
            words_ref=words_ref,
            x_ref=x_ref,
            vector_refs=dict(zip(vectors, of_groups, strict=True)),
            output_refs=dict(zip(by_output, of_outputs, strict=True)),
            expert_ref=expert_ref,
            start_ref=start_ref,
            count_ref=count_ref,
            num_tiles_ref=num_tiles_ref,
            out_ref=out_ref,
            smem=dict(zip(scratch, others, strict=True)),
        ).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_outputs), x_SK.dtype),
        scratch_types=list(scratch.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"),
    )(
        words,
        x_SK,
        *vectors.values(),
        *by_output.values(),
        plan.expert_N,
        plan.start_N,
        plan.count_N,
        plan.num_tiles.reshape(1),
    )


@dataclass(frozen=True)
class _Grouped:
    """The kernel's references and sizes. A product is of a block of a matrix: matrix * sizes.blocks + block of the consumer."""

    plgpu: Any
    number: str
    group: int | None
    num_matrices: int
    tile_rows: int
    is_shared: bool
    sizes: Sizes
    combine: Callable[..., jax.Array]
    num_ctas: int
    num_steps: int
    """Steps of an item."""
    words_ref: Any  # [E * A * N / 64, tiles * word rows, 256]
    x_ref: Any  # [S, K]
    vector_refs: dict[str, Any]  # [E * A, K / group, N]
    output_refs: dict[str, Any]  # factor and bias, [E * A, N]
    expert_ref: Any  # [N]
    start_ref: Any  # [N]
    count_ref: Any  # [N]
    num_tiles_ref: Any  # [1]
    out_ref: Any  # [S, N]
    smem: dict[str, Any]

    def run(self) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg < NUM_CONSUMERS)
        def _():
            self.plgpu.set_max_registers(consumer_registers(NUM_CONSUMERS), action="increase")
            self.consume(wg)

        @pl.when(wg == NUM_CONSUMERS)
        def _():
            self.plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            self.produce()

    @property
    def num_blocks(self) -> int:
        """Blocks of outputs."""
        return self.out_ref.shape[1] // TILE

    @property
    def num_parts(self) -> int:
        """Items of a tile of rows."""
        return pl.cdiv(self.num_blocks, NUM_CONSUMERS * self.sizes.blocks)

    def num_my_items(self) -> Any:
        num_items = self.num_tiles_ref[0] * self.num_parts
        return lax.div(num_items - lax.axis_index("cta") + (self.num_ctas - 1), self.num_ctas)

    def item(self, turn: Any) -> tuple[Any, Any]:
        """The tile of rows, and the first block of outputs."""
        index = turn * self.num_ctas + lax.axis_index("cta")
        return lax.div(index, self.num_parts), lax.rem(index, self.num_parts) * (NUM_CONSUMERS * self.sizes.blocks)

    def block(self, first: Any, consumer: Any, own: int) -> Any:
        """A consumer's own block; past the last for one that has none."""
        return first + consumer * self.sizes.blocks + own

    def slot(self, step: Any) -> Any:
        return lax.rem(step, self.sizes.num_stages)

    # Producer

    def produce(self) -> None:
        free, stages = self.smem["free"], self.sizes.num_stages
        num_items = self.num_my_items()

        @pl.loop(0, num_items)
        def _(turn):
            tile, first = self.item(turn)
            expert = self.expert_ref[tile]
            start = 0 if self.is_shared else lax.div(self.start_ref[tile], ALIGNMENT)

            @pl.loop(0, self.num_steps)
            def _(step):
                index = turn * self.num_steps + step
                slot = self.slot(index)
                pl.when(index >= stages)(lambda: self.plgpu.barrier_wait(free.at[slot]))
                for consumer in range(NUM_CONSUMERS):
                    for matrix in range(self.num_matrices):
                        for own in range(self.sizes.blocks):
                            self.load_block(slot, step, consumer, expert, matrix, own, self.block(first, consumer, own))
                inputs = pl.ds(step * self.sizes.step_tiles * TILE, self.sizes.step_tiles * TILE)
                rows = Rows(start, ALIGNMENT, self.tile_rows)
                row_copies.load(self.x_ref, rows, self.smem["x_smem"].at[slot], self.smem["full"].at[slot], after=(inputs,))

        # What the consumers still release must have arrived before the barriers go.
        num_all = num_items * self.num_steps

        @pl.loop(jnp.maximum(num_all - stages, 0), num_all)
        def _(index):
            self.plgpu.barrier_wait(free.at[self.slot(index)])

    def load_block(self, slot: Any, step: Any, consumer: int, expert: Any, matrix: int, own: int, block: Any) -> None:
        """A step's words, scales and zeros of a block of outputs."""
        full, product = self.smem["full"].at[slot], matrix * self.sizes.blocks + own
        index = expert * self.num_matrices + matrix
        words_smem = self.smem["words_smem"].at[slot, consumer, product]
        size = words_smem.shape[0]
        row_copies.load(self.words_ref, Rows(step, size, size), words_smem, full, before=(index * self.num_blocks + block,))
        for name, ref in self.vector_refs.items():
            target = self.smem[f"{name}_smem"].at[slot, consumer, product]
            rows = self.groups(step, target.shape[0])
            row_copies.load(ref, rows, target, full, before=(index,), after=(pl.ds(block * TILE, TILE),))

    def groups(self, step: Any, size: int) -> Rows:
        """The groups of a step."""
        assert self.group is not None
        inputs = self.sizes.step_tiles * TILE
        return Rows(lax.div(step * inputs, max(self.group, inputs)), size, size)

    # Consumers

    def consume(self, wg: Any) -> None:
        @pl.loop(0, self.num_my_items())
        def _(turn):
            tile, first = self.item(turn)
            sums = self.multiply(wg, turn)
            self.plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for own in range(self.sizes.blocks):
                self.finish(wg, own, sums[own :: self.sizes.blocks], tile, self.block(first, wg, own))

        self.plgpu.wait_smem_to_gmem(0)

    def finish(self, wg: Any, own: int, sums: list[jax.Array], tile: Any, block: Any) -> None:
        """Factor, bias, combination and store of a block of outputs."""
        plgpu, expert = self.plgpu, self.expert_ref[tile]
        # A consumer without a block reads the factors of the last.
        outputs = pl.ds(jnp.minimum(block, self.num_blocks - 1) * TILE, TILE)
        values = []
        for matrix, value in enumerate(sums):
            for name, apply in (("factor", jnp.multiply), ("bias", jnp.add)):
                if name in self.output_refs:
                    source = self.output_refs[name].at[expert * self.num_matrices + matrix, outputs]
                    vector = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
                    value = apply(value, by_rows(vector, self.tile_rows))
            values.append(value)
        out_smem = self.smem["out_smem"].at[wg, own]
        result = self.combine(*values).astype(self.out_ref.dtype)
        out_smem.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA)
        plgpu.commit_smem()

        @pl.when(block < self.num_blocks)
        def _():
            self.store(out_smem, self.start_ref[tile], self.count_ref[tile], pl.ds(block * TILE, TILE))

    def store(self, out_smem: Any, row: Any, count: Any, outputs: Any) -> None:
        """Writes the first rows, in runs of powers of two times 8. The last may end in the room up to the next expert's rows."""
        aligned = lax.div(count + (ALIGNMENT - 1), ALIGNMENT) * ALIGNMENT

        @pl.when(aligned == self.tile_rows)
        def _():
            whole = Rows(lax.div(row, ALIGNMENT), ALIGNMENT, self.tile_rows)
            row_copies.store(out_smem, self.out_ref, whole, after=(outputs,))

        @pl.when(aligned < self.tile_rows)
        def _():
            size = self.tile_rows // 2
            while size >= ALIGNMENT:
                offset = aligned & ~(2 * size - 1)  # longer runs come first

                @pl.when((aligned & size) != 0)
                def _(size=size, offset=offset):
                    run = Rows(lax.div(row + offset, ALIGNMENT), ALIGNMENT, size)
                    row_copies.store(out_smem.at[pl.ds(offset, size)], self.out_ref, run, after=(outputs,))

                size //= 2

    def multiply(self, wg: Any, turn: Any) -> list[jax.Array]:
        """float32 [64, rows] for each of a consumer's products, without the factor."""
        plgpu, full, begin = self.plgpu, self.smem["full"], turn * self.num_steps
        num_products = self.num_matrices * self.sizes.blocks

        def overlapped(*sum_refs: Any) -> list[jax.Array]:
            @pl.loop(0, self.num_steps)
            def _(step):
                slot = self.slot(begin + step)
                plgpu.barrier_wait(full.at[slot])
                for place, (tile, product) in enumerate(self.order()):
                    a = self.operand(wg, slot, product, tile)
                    plgpu.wgmma_wait(0)
                    if place == 0:
                        pl.when(step > 0)(partial(self.release, begin + step - 1))
                    plgpu.wgmma(sum_refs[product], a, self.x_tile(slot, tile))

            plgpu.wgmma_wait(0)
            self.release(begin + self.num_steps - 1)
            return [sum_ref[...] for sum_ref in sum_refs]

        def in_turn(*sum_refs: Any) -> list[jax.Array]:
            @pl.loop(0, self.num_steps)
            def _(step):
                slot = self.slot(begin + step)
                plgpu.barrier_wait(full.at[slot])
                for tile, product in self.order():
                    plgpu.wgmma(sum_refs[product], self.operand(wg, slot, product, tile), self.x_tile(slot, tile))
                plgpu.wgmma_wait(0)  # before registers of operands are written again
                self.release(begin + step)

            return [sum_ref[...] for sum_ref in sum_refs]

        form = overlapped if len(self.order()) == OVERLAPPED else in_turn
        return pl.run_scoped(form, *[plgpu.ACC((TILE, self.tile_rows), jnp.float32) for _ in range(num_products)])

    def order(self) -> list[tuple[int, int]]:
        """Tiles of inputs and products of a step."""
        products = range(self.num_matrices * self.sizes.blocks)
        return [(tile, product) for tile in range(self.sizes.step_tiles) for product in products]

    def release(self, index: Any) -> None:
        """Release the slot that this consumer has read."""
        self.plgpu.barrier_arrive(self.smem["free"].at[self.slot(index)])

    def x_tile(self, slot: Any, tile: int) -> Any:
        """[64, rows] of x.T."""
        return self.smem["x_smem"].at[slot, :, pl.ds(tile * TILE, TILE)].transpose((1, 0))

    def operand(self, wg: Any, slot: Any, product: int, tile: int) -> Any:
        """A tile of the weight for wgmma."""
        inputs = self.sizes.step_tiles * TILE
        scales, zeros = (
            of_tile(self.smem[f"{name}_smem"].at[slot, wg, product], self.group or inputs, tile)
            if name in self.vector_refs
            else []
            for name in ("scale", "zero")
        )
        interpreted = self.smem.get("interpreted_smem")
        interpreted = interpreted if interpreted is None else interpreted.at[wg]
        return operand(self.number, self.smem["words_smem"].at[slot, wg, product], tile, scales, zeros, interpreted)
