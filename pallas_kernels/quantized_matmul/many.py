"""Many rows times a packed weight, by Pallas Mosaic GPU (Hopper): bound by the tensor cores.

    warpgroups 0 ...  (consumers)   64 outputs each of an item, all for the same tile of rows
    the last          (producer)    TMA copies of words, scales, zeros and x in steps of 64 inputs, into a ring of shared memory

A CTA per core stays for the whole launch and walks through items, blocks of outputs first, so that CTAs that run at a time share rows
of x in the cache. The transposed product is computed, weight @ x.T, and transposed on its way through shared memory. While one consumer
decodes and scales a tile of the weight, the tensor cores multiply the other's. Where there are fewer items than cores, several CTAs have
parts of the inputs of one item (see `result`). What lies outside of an array a copy fills with zeros, or does not write.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import _compat, producer_consumer, row_copies
from pallas_kernels.quantized_matmul import cta, result
from pallas_kernels.quantized_matmul.cta import RESERVED_BYTES, SMEM_BYTES
from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, of_tile, operand, unfolded, word_rows
from pallas_kernels.quantized_matmul.packed import TILE, Packed
from pallas_kernels.quantized_matmul.result import MAX_PAIRED, PARTS, Result
from pallas_kernels.row_copies import Rows

ALIGNMENT = 8  # rows of a swizzle tile
MAX_TILE_ROWS = {2: 256, 3: 128, 4: 64}
"""By the number of consumers: the sums fit into their registers."""
_MIN_TILE_ROWS = 16
_MIN_STAGES = 3
_MIN_STEPS = 8
"""Of a part."""
_ITEM_CYCLES, _PARTS_CYCLES = 5500, 2000
"""Estimates: while an item begins and ends, and to add parts."""
_OUTSIDE_PER_CYCLE = 250
"""Sums of parts that are written to memory and read again."""
STEPS = 2
"""Steps of an iteration. Registers that a product in flight still reads belong to the other one: with one step an iteration they would
be written again too early, which nothing reports (results are wrong)."""
_MAX_STAGES = 8
"""More in flight are slower: 36.2 µs with 8, 41.8 with 12 (int4, 28672 x 4096, 64 rows, H200)."""


@dataclass(frozen=True)
class ManySizes:
    """Consumers of a CTA, rows of a tile, parts of the inputs, and stages of the ring."""

    num_consumers: int
    tile_rows: int
    num_parts: int
    num_stages: int


def num_items(num_rows: int, num_blocks: int, sizes: ManySizes) -> int:
    """Blocks of outputs by consumers, times tiles of rows."""
    return pl.cdiv(num_blocks, sizes.num_consumers) * pl.cdiv(num_rows, sizes.tile_rows)


def num_steps(weight: Packed, sizes: ManySizes) -> int:
    """Steps of a part of the inputs, a multiple of STEPS."""
    return pl.cdiv(weight.words.shape[1], sizes.num_parts * STEPS) * STEPS


def pick_sizes(num_rows: int, weight: Packed, num_cores: int, itemsize: int = 2) -> ManySizes:
    """The sizes that are estimated to be the fastest. itemsize: bytes of a result."""

    def cycles(sizes: ManySizes) -> float:
        num_turns = pl.cdiv(num_items(num_rows, weight.words.shape[0], sizes) * sizes.num_parts, num_cores)
        steps = num_steps(weight, sizes) * _cycles(sizes.num_consumers, sizes.tile_rows)
        num_outside = num_rows * weight.num_outputs * sizes.num_parts * (sizes.num_parts > MAX_PAIRED)
        return num_turns * (steps + _ITEM_CYCLES) + max(_PARTS_CYCLES, num_outside / _OUTSIDE_PER_CYCLE) * (sizes.num_parts > 1)

    return min(_candidates(num_rows, weight, num_cores, itemsize), key=cycles)


def _candidates(num_rows: int, weight: Packed, num_cores: int, itemsize: int) -> Iterator[ManySizes]:
    """Equal tiles of rows, parts where there are cores for all, and as many stages as fit."""
    for num_consumers, max_tile_rows in MAX_TILE_ROWS.items():
        for num_tiles in range(pl.cdiv(num_rows, max_tile_rows), pl.cdiv(num_rows, _MIN_TILE_ROWS) + 1):
            tile_rows = pl.cdiv(pl.cdiv(num_rows, num_tiles), ALIGNMENT) * ALIGNMENT
            for num_parts in PARTS:
                sizes = ManySizes(num_consumers, tile_rows, num_parts, 0)
                num_ctas = num_parts * num_items(num_rows, weight.words.shape[0], sizes)
                if num_parts > 1 and (num_ctas > num_cores or num_steps(weight, sizes) < _MIN_STEPS):
                    break
                room = SMEM_BYTES - RESERVED_BYTES - result.smem_bytes(num_consumers, tile_rows, num_parts, itemsize)
                num_stages = min(_MAX_STAGES, room // _stage_bytes(weight, num_consumers, tile_rows))
                if num_stages >= _MIN_STAGES:
                    yield replace(sizes, num_stages=num_stages)


def _cycles(num_consumers: int, tile_rows: int) -> float:
    """Estimated cycles of a step: within a tenth of what an H100 took for 32 to 256 rows."""
    return num_consumers * (170 + 1.4 * tile_rows)


def _stage_bytes(weight: Packed, num_consumers: int, tile_rows: int) -> int:
    of_words = TILE * TILE * DECODERS[weight.number].bits // 8
    of_vectors = sum(TILE * cta.num_groups(weight, TILE) * vector.dtype.itemsize for vector in cta.vectors(weight).values())
    return 2 * tile_rows * TILE + num_consumers * (of_words + of_vectors)


def product(
    x_TK: jax.Array, weight: Packed, *, dtype: DTypeLike | None = None, sizes: ManySizes | None = None, interpret: Any = False
) -> jax.Array:
    """[T, N] in dtype, by default that of x: x @ weight.T, T a multiple of 8, K the inputs of the weight."""
    dtype = jnp.dtype(dtype or x_TK.dtype)
    plgpu = _compat.mosaic()
    num_rows = x_TK.shape[0]
    sizes = sizes or pick_sizes(num_rows, weight, _compat.num_cores(), dtype.itemsize)
    num_consumers, num_parts = sizes.num_consumers, sizes.num_parts
    outside = bool(interpret) or num_parts > MAX_PAIRED
    vectors = cta.vectors(weight)
    if x_TK.shape[1] == TILE:
        # A copy leaves out what an array has one tile of, and its start too: without a second tile, the steps past the last read the first.
        x_TK = jnp.pad(x_TK, ((0, 0), (0, TILE)))
    num_all_items = num_items(num_rows, weight.words.shape[0], sizes)
    factors = () if weight.factor is None else (weight.factor,)
    num_ctas = num_all_items if num_parts > 1 else 2 if interpret else _compat.num_cores()

    swizzled = plgpu.TilingTransform((ALIGNMENT, TILE)), plgpu.SwizzleTransform(128)
    stages = sizes.num_stages
    scratch = {
        "words_smem": plgpu.SMEM((stages, num_consumers, word_rows(DECODERS[weight.number].bits), WORD_COLUMNS), jnp.int32),
        "x_smem": plgpu.SMEM((stages, sizes.tile_rows, TILE), x_TK.dtype, transforms=swizzled),
        "full": plgpu.Barrier(num_arrivals=2 + len(vectors), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=num_consumers, num_barriers=stages),
    }
    groups = cta.num_groups(weight, TILE)
    scratch |= {
        f"{name}_smem": plgpu.SMEM((stages, groups, num_consumers * TILE), vector.dtype) for name, vector in vectors.items()
    }
    of_result = result.scratch(num_consumers, sizes.tile_rows, num_parts, dtype, outside)
    scratch |= of_result
    if interpret:
        scratch["interpreted_smem"] = plgpu.SMEM((num_consumers, TILE, TILE), x_TK.dtype)

    def body(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        own, refs = refs[: len(vectors)], refs[len(vectors) :]
        factor_refs, (out_ref, *others) = refs[: len(factors)], refs[len(factors) :]
        smem = dict(zip(scratch, others, strict=True))
        _Many(
            plgpu=plgpu,
            number=weight.number,
            group=weight.group,
            fold=weight.fold,
            sizes=sizes,
            num_items=num_all_items,
            num_ctas=num_ctas,
            num_steps=num_steps(weight, sizes),
            words_ref=words_ref,
            x_ref=x_ref,
            vector_refs=dict(zip(vectors, own, strict=True)),
            result=Result(
                out_ref=out_ref,
                factor_ref=factor_refs[0] if factors else None,
                num_blocks=weight.words.shape[0],
                num_parts=num_parts,
                interpret=bool(interpret),
                **{name: smem[name] for name in of_result},
            ),
            smem=smem,
        ).run()

    returned = plgpu.kernel(
        body,
        out_type=result.type_of(num_rows, weight.num_outputs, num_parts, dtype, outside),
        scratch_types=list(scratch.values()),
        **result.axes(num_ctas, "cta", num_parts, outside),
        num_threads=num_consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"),
    )(cta.words(weight), x_TK, *vectors.values(), *factors)
    return result.finished(returned, weight.factor, dtype)


@dataclass(frozen=True)
class _Many:
    """The kernel's references and sizes."""

    plgpu: Any
    number: str
    group: int | None
    fold: int
    """Power of two by which stored scales are larger, see `fold_of`."""
    sizes: ManySizes
    num_items: int
    num_ctas: int
    """Without parts; else the clusters."""
    num_steps: int
    """Steps of a part of an item, a multiple of STEPS."""
    words_ref: Any  # [N / 64, tiles * word rows, 256]
    x_ref: Any  # [T, K]
    vector_refs: dict[str, Any]  # [K / group, N]
    result: Result
    smem: dict[str, Any]

    def run(self) -> None:
        producer_consumer.run(self.sizes.num_consumers, self.consume, self.produce)

    def num_my_items(self) -> Any:
        return lax.div(self.num_items - lax.axis_index("cta") + (self.num_ctas - 1), self.num_ctas)

    def item(self, turn: Any) -> tuple[Any, Any]:
        """The first block of outputs, and the tile of rows."""
        index, num_consumers = turn * self.num_ctas + lax.axis_index("cta"), self.sizes.num_consumers
        per_tile = pl.cdiv(self.words_ref.shape[0], num_consumers)
        return lax.rem(index, per_tile) * num_consumers, lax.div(index, per_tile)

    def rows(self, tile: Any) -> Rows:
        size = self.sizes.tile_rows
        return Rows(tile, size, size)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, self.sizes.num_stages)

    # Producer

    def produce(self) -> None:
        full, free, stages = self.smem["full"], self.smem["free"], self.sizes.num_stages
        num_all, before = self.num_my_items() * self.num_steps, lax.axis_index("part") * self.num_steps

        @pl.loop(0, num_all)
        def _(index):
            (first, tile), step, slot = (
                self.item(lax.div(index, self.num_steps)),
                before + lax.rem(index, self.num_steps),
                self.slot(index),
            )
            pl.when(index >= stages)(lambda: self.plgpu.barrier_wait(free.at[slot]))
            # One copy for all consumers: the producer is slow to begin one.
            words_smem, num_consumers = self.smem["words_smem"].at[slot], self.sizes.num_consumers
            rows = Rows(step, words_smem.shape[1], words_smem.shape[1])
            row_copies.load(self.words_ref, rows, words_smem, full.at[slot], before=(pl.ds(first, num_consumers),))
            for name, ref in self.vector_refs.items():
                target = self.smem[f"{name}_smem"].at[slot]
                outputs = pl.ds(first * TILE, num_consumers * TILE)
                row_copies.load(ref, self.groups(step, target.shape[0]), target, full.at[slot], after=(outputs,))
            inputs = pl.ds(step * TILE, TILE)
            row_copies.load(self.x_ref, self.rows(tile), self.smem["x_smem"].at[slot], full.at[slot], after=(inputs,))

        # What the consumers still release must have arrived before the barriers go.
        @pl.loop(jnp.maximum(num_all - stages, 0), num_all)
        def _(index):
            self.plgpu.barrier_wait(free.at[self.slot(index)])

        self.result.pass_by()

    def groups(self, step: Any, size: int) -> Rows:
        """The groups of a step."""
        assert self.group is not None
        return Rows(lax.div(step * TILE, max(self.group, TILE)), size, size)

    # Consumers

    def consume(self, wg: Any) -> None:
        @pl.loop(0, self.num_my_items())
        def _(turn):
            first, tile = self.item(turn)
            self.result.write(wg, first + wg, self.rows(tile), self.multiply(wg, turn))

        self.result.leave()

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
            return unfolded(sum_ref[...], self.number, self.fold)

        return pl.run_scoped(accumulate, plgpu.ACC((TILE, self.sizes.tile_rows), jnp.float32))

    def release(self, index: Any) -> None:
        """Release the slot that this consumer has read."""
        self.plgpu.barrier_arrive(self.smem["free"].at[self.slot(index)])

    def operand(self, wg: Any, slot: Any) -> Any:
        """The weight's tile of a step for wgmma."""
        scales, zeros = (
            of_tile(self.smem[f"{name}_smem"].at[slot, :, pl.ds(wg * TILE, TILE)], self.group or TILE, 0)
            if name in self.vector_refs
            else []
            for name in ("scale", "zero")
        )
        interpreted = self.smem.get("interpreted_smem")
        interpreted = interpreted if interpreted is None else interpreted.at[wg]
        return operand(self.number, self.smem["words_smem"].at[slot, wg], 0, scales, zeros, interpreted, fold=self.fold)
