"""Many rows times a packed weight, by Pallas Mosaic GPU (Hopper): bound by the tensor cores.

    warpgroups 0, 1  (consumers)   64 outputs each of an item of 128 outputs x a tile of rows
    warpgroup 2      (producer)    TMA copies of words, scales, zeros and x in steps of 64 inputs, into a ring of shared memory

A CTA per core stays for the whole launch and walks through items, blocks of outputs first, so that CTAs that run at a time share rows
of x in the cache. The transposed product is computed, weight @ x.T, and transposed on its way through shared memory. While one consumer
decodes and scales a tile of the weight, the tensor cores multiply the other's. What lies outside of an array a copy fills with zeros,
or does not write.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat, row_copies
from pallas_kernels.quantized_matmul import cta
from pallas_kernels.quantized_matmul.cta import PRODUCER_REGISTERS, RESERVED_BYTES, SMEM_BYTES, consumer_registers
from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, by_rows, of_tile, operand, word_rows
from pallas_kernels.quantized_matmul.packed import TILE, Packed
from pallas_kernels.row_copies import Rows

NUM_CONSUMERS = 2
ALIGNMENT = 8  # rows of a swizzle tile
MAX_TILE_ROWS = 256
STEPS = 2
"""Steps of an iteration. Registers that a product in flight still reads belong to the other one: with one step an iteration they would
be written again too early, which nothing reports (results are wrong)."""
_MAX_STAGES = 12


@dataclass(frozen=True)
class ManySizes:
    """Rows of a tile, and stages of the ring."""

    tile_rows: int
    num_stages: int


def num_items(num_rows: int, num_blocks: int, tile_rows: int) -> int:
    """Pairs of blocks of outputs, times tiles of rows."""
    return pl.cdiv(num_blocks, NUM_CONSUMERS) * pl.cdiv(num_rows, tile_rows)


def pick_sizes(num_rows: int, weight: Packed) -> ManySizes:
    """The fewest equal tiles of rows, and as many stages as fit."""
    tile_rows = pl.cdiv(pl.cdiv(num_rows, pl.cdiv(num_rows, MAX_TILE_ROWS)), ALIGNMENT) * ALIGNMENT
    words = NUM_CONSUMERS * TILE * TILE * DECODERS[weight.number].bits // 8
    groups = cta.num_groups(weight, TILE)
    vectors = sum(NUM_CONSUMERS * TILE * groups * vector.dtype.itemsize for vector in cta.vectors(weight).values())
    room = SMEM_BYTES - RESERVED_BYTES - 2 * NUM_CONSUMERS * tile_rows * TILE
    return ManySizes(tile_rows, min(_MAX_STAGES, room // (2 * tile_rows * TILE + words + vectors)))


def product(x_TK: jax.Array, weight: Packed, *, sizes: ManySizes | None = None, interpret: Any = False) -> jax.Array:
    """bfloat16 [T, N]: x @ weight.T, T a multiple of 8, K the inputs of the weight."""
    plgpu = _compat.mosaic()
    num_rows = x_TK.shape[0]
    sizes = sizes or pick_sizes(num_rows, weight)
    vectors = cta.vectors(weight)
    factors = () if weight.factor is None else (weight.factor,)
    num_ctas = 2 if interpret else _compat.num_cores()

    def swizzled(*shape: int) -> Any:
        transforms = (plgpu.TilingTransform((ALIGNMENT, TILE)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, x_TK.dtype, transforms=transforms)

    stages = sizes.num_stages
    num_copies = 1 + NUM_CONSUMERS * (1 + len(vectors))
    scratch = {
        "words_smem": plgpu.SMEM((stages, NUM_CONSUMERS, word_rows(DECODERS[weight.number].bits), WORD_COLUMNS), jnp.int32),
        "x_smem": swizzled(stages, sizes.tile_rows, TILE),
        "out_smem": swizzled(NUM_CONSUMERS, sizes.tile_rows, TILE),
        "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
    }
    groups = cta.num_groups(weight, TILE)
    scratch |= {
        f"{name}_smem": plgpu.SMEM((stages, NUM_CONSUMERS, groups, TILE), vector.dtype) for name, vector in vectors.items()
    }
    if interpret:
        scratch["interpreted_smem"] = plgpu.SMEM((NUM_CONSUMERS, TILE, TILE), x_TK.dtype)

    def body(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        own, refs = refs[: len(vectors)], refs[len(vectors) :]
        factor_refs, (out_ref, *others) = refs[: len(factors)], refs[len(factors) :]
        _Many(
            plgpu=plgpu,
            number=weight.number,
            group=weight.group,
            sizes=sizes,
            num_ctas=num_ctas,
            num_steps=pl.cdiv(weight.words.shape[1], STEPS) * STEPS,
            words_ref=words_ref,
            x_ref=x_ref,
            vector_refs=dict(zip(vectors, own, strict=True)),
            factor_ref=factor_refs[0] if factors else None,
            out_ref=out_ref,
            smem=dict(zip(scratch, others, strict=True)),
        ).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, weight.num_outputs), x_TK.dtype),
        scratch_types=list(scratch.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"),
    )(cta.words(weight), x_TK, *vectors.values(), *factors)


@dataclass(frozen=True)
class _Many:
    """The kernel's references and sizes."""

    plgpu: Any
    number: str
    group: int | None
    sizes: ManySizes
    num_ctas: int
    num_steps: int
    """Steps of an item, a multiple of STEPS."""
    words_ref: Any  # [N / 64, tiles * word rows, 256]
    x_ref: Any  # [T, K]
    vector_refs: dict[str, Any]  # [K / group, N]
    factor_ref: Any  # [N] or None
    out_ref: Any  # [T, N]
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
    def num_pairs(self) -> int:
        """Pairs of blocks of outputs."""
        return pl.cdiv(self.words_ref.shape[0], NUM_CONSUMERS)

    def num_my_items(self) -> Any:
        num_all = num_items(self.x_ref.shape[0], self.words_ref.shape[0], self.sizes.tile_rows)
        return lax.div(num_all - lax.axis_index("cta") + (self.num_ctas - 1), self.num_ctas)

    def item(self, turn: Any) -> tuple[Any, Any]:
        """The first block of outputs, and the tile of rows."""
        index = turn * self.num_ctas + lax.axis_index("cta")
        return lax.rem(index, self.num_pairs) * NUM_CONSUMERS, lax.div(index, self.num_pairs)

    def rows(self, tile: Any) -> Rows:
        size = self.sizes.tile_rows
        return Rows(tile, size, size)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, self.sizes.num_stages)

    # Producer

    def produce(self) -> None:
        full, free, stages = self.smem["full"], self.smem["free"], self.sizes.num_stages
        num_all = self.num_my_items() * self.num_steps

        @pl.loop(0, num_all)
        def _(index):
            (first, tile), step, slot = (
                self.item(lax.div(index, self.num_steps)),
                lax.rem(index, self.num_steps),
                self.slot(index),
            )
            pl.when(index >= stages)(lambda: self.plgpu.barrier_wait(free.at[slot]))
            for consumer in range(NUM_CONSUMERS):
                words_smem = self.smem["words_smem"].at[slot, consumer]
                rows = Rows(step, words_smem.shape[0], words_smem.shape[0])
                row_copies.load(self.words_ref, rows, words_smem, full.at[slot], before=(first + consumer,))
                for name, ref in self.vector_refs.items():
                    target = self.smem[f"{name}_smem"].at[slot, consumer]
                    outputs = pl.ds((first + consumer) * TILE, TILE)
                    row_copies.load(ref, self.groups(step, target.shape[0]), target, full.at[slot], after=(outputs,))
            inputs = pl.ds(step * TILE, TILE)
            row_copies.load(self.x_ref, self.rows(tile), self.smem["x_smem"].at[slot], full.at[slot], after=(inputs,))

        # What the consumers still release must have arrived before the barriers go.
        @pl.loop(jnp.maximum(num_all - stages, 0), num_all)
        def _(index):
            self.plgpu.barrier_wait(free.at[self.slot(index)])

    def groups(self, step: Any, size: int) -> Rows:
        """The groups of a step."""
        assert self.group is not None
        return Rows(lax.div(step * TILE, max(self.group, TILE)), size, size)

    # Consumers

    def consume(self, wg: Any) -> None:
        @pl.loop(0, self.num_my_items())
        def _(turn):
            first, tile = self.item(turn)
            block = first + wg
            sums = self.multiply(wg, turn)
            if self.factor_ref is not None:
                # A consumer without a block reads the factors of the last.
                own = jnp.minimum(block, self.words_ref.shape[0] - 1)
                layout = self.plgpu.Layout.WGMMA.reduce(1)
                factor = self.plgpu.load(self.factor_ref.at[pl.ds(own * TILE, TILE)], layout=layout, optimized=False)
                sums = sums * by_rows(factor, sums.shape[1])
            out_smem = self.smem["out_smem"].at[wg]
            self.plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem.transpose((1, 0))[...] = self.plgpu.layout_cast(sums.astype(self.out_ref.dtype), self.plgpu.Layout.WGMMA)
            self.plgpu.commit_smem()

            @pl.when(block < self.words_ref.shape[0])
            def _():
                row_copies.store(out_smem, self.out_ref, self.rows(tile), after=(pl.ds(block * TILE, TILE),))

        self.plgpu.wait_smem_to_gmem(0)

    def multiply(self, wg: Any, turn: Any) -> jax.Array:
        """float32 [64, rows]: this consumer's outputs of an item, without the factor."""
        plgpu, full = self.plgpu, self.smem["full"]
        begin = turn * self.num_steps

        def accumulate(sum_ref: Any) -> jax.Array:
            @pl.loop(0, self.num_steps // STEPS)
            def _(iteration):
                for part in range(STEPS):
                    step = iteration * STEPS + part
                    slot = self.slot(begin + step)
                    plgpu.barrier_wait(full.at[slot])
                    a = self.operand(wg, slot)
                    plgpu.wgmma_wait(0)
                    pl.when(step > 0)(partial(self.release, begin + step - 1))
                    plgpu.wgmma(sum_ref, a, self.smem["x_smem"].at[slot].transpose((1, 0)))

            plgpu.wgmma_wait(0)
            self.release(begin + self.num_steps - 1)
            return sum_ref[...]

        return pl.run_scoped(accumulate, plgpu.ACC((TILE, self.sizes.tile_rows), jnp.float32))

    def release(self, index: Any) -> None:
        """Release the slot that this consumer has read."""
        self.plgpu.barrier_arrive(self.smem["free"].at[self.slot(index)])

    def operand(self, wg: Any, slot: Any) -> Any:
        """The weight's tile of a step for wgmma."""
        scales, zeros = (
            of_tile(self.smem[f"{name}_smem"].at[slot, wg], self.group or TILE, 0) if name in self.vector_refs else []
            for name in ("scale", "zero")
        )
        interpreted = self.smem.get("interpreted_smem")
        interpreted = interpreted if interpreted is None else interpreted.at[wg]
        return operand(self.number, self.smem["words_smem"].at[slot, wg], 0, scales, zeros, interpreted)
