"""Few rows times a packed weight, by Pallas Mosaic GPU (Hopper): bound by reading the weight.

    warpgroups 0 ...  (consumers)   a block of 64 outputs each
    the last          (producer)    TMA copies of words, scales, zeros and x in steps of 256 inputs

A CTA has as many blocks of outputs as consumers, and one of several equal parts of the inputs; two are added by a pair of CTAs, four
outside of the kernel (see `result`).
The transposed product is computed, weight @ x.T: a tile of the weight is decoded into registers, which wgmma takes as its first
operand. Sums of groups of 128 inputs are scaled as they are, in float32; scales of smaller groups are multiplied with the decoded
values. What lies outside of an array a copy fills with zeros: the last step and the last blocks need not be whole.
"""

from dataclasses import dataclass
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
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, by_rows, load_rows, of_tile, operand, unfolded, word_rows
from pallas_kernels.quantized_matmul.packed import TILE, Packed
from pallas_kernels.quantized_matmul.result import MAX_PAIRED, PARTS, Result
from pallas_kernels.row_copies import Rows

STEP_TILES = 4
STEP = STEP_TILES * TILE
"""Inputs of a step."""
SUMMED_GROUP = 128
"""Inputs of a group whose sums are scaled."""
_WANTED_STAGE_BYTES = 96 << 10
"""In flight, of a core: fewer do not hide the latency of reading, more are slower (H100: 25.0 µs with 99 KiB, 27.9 with 165)."""
_IDLE_BYTES = 48 << 10
"""Bytes that a core could read while a CTA begins and ends: an estimate."""
_ADDING_BYTES = 14
"""Bytes for each output that a core could read while parts are added outside of the kernel: an estimate."""
_MIN_STAGES = 2


@dataclass(frozen=True)
class FewSizes:
    """Consumers of a CTA, parts of the inputs, and stages of the ring."""

    num_consumers: int
    num_parts: int
    num_stages: int


def pick_sizes(num_rows: int, weight: Packed, num_cores: int, itemsize: int = 2) -> FewSizes:
    """Sizes with which each core reads the least of the weight, its CTAs one after the other. itemsize: bytes of a result.

    Raises ValueError for more rows than shared memory holds in any way.
    """
    num_blocks, num_steps = weight.words.shape[0], pl.cdiv(weight.words.shape[1], STEP_TILES)
    best: tuple[tuple[int, ...], FewSizes] | None = None
    for num_consumers in (4, 3, 2):
        for num_parts in PARTS:
            steps = pl.cdiv(num_steps, num_parts)
            if steps * (num_parts - 1) >= num_steps:
                break
            stage = _stage_bytes(weight, num_consumers)
            room = SMEM_BYTES - RESERVED_BYTES - result.smem_bytes(num_consumers, num_rows, num_parts, itemsize)
            num_stages = min(room // (stage + 2 * num_rows * STEP), pl.cdiv(_WANTED_STAGE_BYTES, stage))
            if num_stages < _MIN_STAGES:
                continue
            num_turns = pl.cdiv(pl.cdiv(num_blocks, num_consumers) * num_parts, num_cores)
            is_shallow = num_stages * stage < min(_WANTED_STAGE_BYTES, steps * stage)
            idle = _IDLE_BYTES + _ADDING_BYTES * TILE * num_blocks * (num_parts > MAX_PAIRED)
            cost = (is_shallow, num_turns * (steps * stage + idle), num_parts)
            if best is None or cost < best[0]:
                best = cost, FewSizes(num_consumers, num_parts, min(num_stages, steps))
    if best is None:
        raise ValueError(f"{num_rows} rows do not fit into shared memory in any way")
    return best[1]


def _stage_bytes(weight: Packed, num_consumers: int) -> int:
    groups = cta.num_groups(weight, STEP)
    of_vectors = sum(vector.dtype.itemsize * groups * TILE for vector in cta.vectors(weight).values())
    return num_consumers * (STEP * TILE * DECODERS[weight.number].bits // 8 + of_vectors)


def product(
    x_MK: jax.Array, weight: Packed, *, dtype: DTypeLike | None = None, sizes: FewSizes | None = None, interpret: Any = False
) -> jax.Array:
    """[M, N] in dtype, by default that of x: x @ weight.T, M a multiple of 8, K the inputs of the weight."""
    dtype = jnp.dtype(dtype or x_MK.dtype)
    sizes = sizes or pick_sizes(x_MK.shape[0], weight, _compat.num_cores(), dtype.itemsize)
    plgpu = _compat.mosaic()
    outside = bool(interpret) or sizes.num_parts > MAX_PAIRED
    num_rows, vectors = x_MK.shape[0], cta.vectors(weight)
    num_steps = pl.cdiv(pl.cdiv(weight.words.shape[1], STEP_TILES), sizes.num_parts)
    swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    ring = sizes.num_stages, sizes.num_consumers
    scratch = {
        "words_smem": plgpu.SMEM((*ring, STEP_TILES * word_rows(DECODERS[weight.number].bits), WORD_COLUMNS), jnp.int32),
        "x_smem": plgpu.SMEM((sizes.num_stages, num_rows, STEP), x_MK.dtype, transforms=swizzled),
        "full": plgpu.Barrier(num_arrivals=2 + len(vectors), num_barriers=sizes.num_stages),
        "free": plgpu.Barrier(num_arrivals=sizes.num_consumers, num_barriers=sizes.num_stages),
    }
    scratch |= {
        f"{name}_smem": plgpu.SMEM((sizes.num_stages, cta.num_groups(weight, STEP), sizes.num_consumers * TILE), vector.dtype)
        for name, vector in vectors.items()
    }
    of_result = result.scratch(sizes.num_consumers, num_rows, sizes.num_parts, dtype, outside)
    scratch |= of_result
    factors = () if weight.factor is None else (weight.factor,)
    if interpret:
        scratch["interpreted_smem"] = plgpu.SMEM((sizes.num_consumers, SUMMED_GROUP // TILE, TILE, TILE), x_MK.dtype)

    def body(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        own, refs = refs[: len(vectors)], refs[len(vectors) :]
        factor_refs, (out_ref, *others) = refs[: len(factors)], refs[len(factors) :]
        smem = dict(zip(scratch, others, strict=True))
        _Few(
            plgpu=plgpu,
            number=weight.number,
            group=weight.group,
            fold=weight.fold,
            sizes=sizes,
            num_steps=num_steps,
            words_ref=words_ref,
            x_ref=x_ref,
            vector_refs=dict(zip(vectors, own, strict=True)),
            result=Result(
                out_ref=out_ref,
                factor_ref=factor_refs[0] if factors else None,
                num_blocks=weight.words.shape[0],
                num_parts=sizes.num_parts,
                interpret=bool(interpret),
                **{name: smem[name] for name in of_result},
            ),
            smem=smem,
        ).run()

    returned = plgpu.kernel(
        body,
        out_type=result.type_of(num_rows, weight.num_outputs, sizes.num_parts, dtype, outside),
        scratch_types=list(scratch.values()),
        **result.axes(pl.cdiv(weight.words.shape[0], sizes.num_consumers), "blocks", sizes.num_parts, outside),
        num_threads=sizes.num_consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"),
    )(cta.words(weight), x_MK, *vectors.values(), *factors)
    return result.finished(returned, weight.factor, dtype)


@dataclass(frozen=True)
class _Few:
    """The kernel's references and sizes."""

    plgpu: Any
    number: str
    group: int | None
    fold: int
    """Power of two by which stored scales are larger, see `fold_of`."""
    sizes: FewSizes
    num_steps: int
    """Steps of a part."""
    words_ref: Any  # [N / 64, tiles * word rows, 256]
    x_ref: Any  # [M, K]
    vector_refs: dict[str, Any]  # [K / group, N]
    result: Result
    smem: dict[str, Any]

    def run(self) -> None:
        producer_consumer.run(self.sizes.num_consumers, self.consume, self.produce)

    def block(self, consumer: Any) -> Any:
        """The block of outputs of a consumer; past the last for one that has none."""
        return lax.axis_index("blocks") * self.sizes.num_consumers + consumer

    def slot(self, step: Any) -> Any:
        return lax.rem(step, self.sizes.num_stages)

    # Producer

    def produce(self) -> None:
        part, num_rows, full, free = lax.axis_index("part"), self.x_ref.shape[0], self.smem["full"], self.smem["free"]

        @pl.loop(0, self.num_steps)
        def _(step):
            slot, source = self.slot(step), part * self.num_steps + step
            pl.when(step >= self.sizes.num_stages)(lambda: self.plgpu.barrier_wait(free.at[slot]))
            # One copy for all consumers: the producer is slow to begin one.
            first, num_consumers = self.block(0), self.sizes.num_consumers
            words_smem = self.smem["words_smem"].at[slot]
            rows = Rows(source, words_smem.shape[1], words_smem.shape[1])
            row_copies.load(self.words_ref, rows, words_smem, full.at[slot], before=(pl.ds(first, num_consumers),))
            for name, ref in self.vector_refs.items():
                target, outputs = self.smem[f"{name}_smem"].at[slot], pl.ds(first * TILE, num_consumers * TILE)
                rows = Rows(source, target.shape[0], target.shape[0])
                row_copies.load(ref, rows, target, full.at[slot], after=(outputs,))
            x_smem, inputs = self.smem["x_smem"].at[slot], pl.ds(source * STEP, STEP)
            row_copies.load(self.x_ref, Rows(0, num_rows, num_rows), x_smem, full.at[slot], after=(inputs,))

        # What the consumers still release must have arrived before the barriers go.
        @pl.loop(max(self.num_steps - self.sizes.num_stages, 0), self.num_steps)
        def _(step):
            self.plgpu.barrier_wait(free.at[self.slot(step)])

        self.result.pass_by()

    # Consumers

    def consume(self, wg: Any) -> None:
        sums = self.scaled_sums(wg) if self.group == SUMMED_GROUP else self.plain_sums(wg)
        self.result.write(wg, self.block(wg), Rows(0, self.x_ref.shape[0], self.x_ref.shape[0]), sums)
        self.result.leave()

    def scaled_sums(self, wg: Any) -> jax.Array:
        """float32 [64, M]. A group is decoded while the tensor cores multiply the one before; at a step's end they have read all of it."""
        plgpu, num_rows = self.plgpu, self.x_ref.shape[0]
        tiles = SUMMED_GROUP // TILE
        shape = TILE, num_rows

        def operands(slot: Any, group: int) -> list[Any]:
            return [self.operand(wg, slot, tile) for tile in range(group * tiles, (group + 1) * tiles)]

        def step(index: Any, total: jax.Array) -> jax.Array:
            slot = self.slot(index)
            plgpu.barrier_wait(self.smem["full"].at[slot])

            def multiply(*sum_refs: Any) -> jax.Array:
                sums, upcoming = total, operands(slot, 0)
                for group, sum_ref in enumerate(sum_refs):
                    for tile, a in enumerate(upcoming, group * tiles):
                        plgpu.wgmma(sum_ref, a, self.x_tile(slot, tile))
                    upcoming = operands(slot, group + 1) if group + 1 < len(sum_refs) else []
                    scale = load_rows(self.vector("scale", wg, slot).at[group]).astype(jnp.float32)
                    sums += sum_ref[...] * by_rows(scale, num_rows)
                return sums

            sum_refs = [plgpu.ACC(shape, jnp.float32) for _ in range(STEP // SUMMED_GROUP)]
            total = pl.run_scoped(multiply, *sum_refs)
            plgpu.barrier_arrive(self.smem["free"].at[slot])
            return total

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, self.num_steps, step, zero)
        return total * 2.0**-self.fold if self.fold else total

    def plain_sums(self, wg: Any) -> jax.Array:
        """float32 [64, M], scales multiplied with the decoded values."""
        plgpu = self.plgpu

        def multiply(sum_ref: Any) -> jax.Array:
            @pl.loop(0, self.num_steps)
            def _(step):
                slot = self.slot(step)
                plgpu.barrier_wait(self.smem["full"].at[slot])
                for tile in range(STEP_TILES):
                    plgpu.wgmma(sum_ref, self.operand(wg, slot, tile), self.x_tile(slot, tile))
                plgpu.wgmma_wait(0)  # before registers of operands are written again
                plgpu.barrier_arrive(self.smem["free"].at[slot])

            return unfolded(sum_ref[...], self.number, self.fold)

        return pl.run_scoped(multiply, plgpu.ACC((TILE, self.x_ref.shape[0]), jnp.float32))

    def operand(self, wg: Any, slot: Any, tile: int) -> Any:
        """A tile of the weight for wgmma."""

        def vectors(name: str) -> list[jax.Array]:
            is_there = name in self.vector_refs and not (name == "scale" and self.group == SUMMED_GROUP)
            return of_tile(self.vector(name, wg, slot), self.group or STEP, tile) if is_there else []

        interpreted = self.smem.get("interpreted_smem")
        interpreted = interpreted if interpreted is None else interpreted.at[wg, tile % interpreted.shape[1]]
        words_smem = self.smem["words_smem"].at[slot, wg]
        fold = 0 if self.group == SUMMED_GROUP else self.fold
        return operand(self.number, words_smem, tile, vectors("scale"), vectors("zero"), interpreted, fold=fold)

    def vector(self, name: str, wg: Any, slot: Any) -> Any:
        """The scales or zeros of a step, [groups, 64]."""
        return self.smem[f"{name}_smem"].at[slot, :, pl.ds(wg * TILE, TILE)]

    def x_tile(self, slot: Any, tile: int) -> Any:
        """[64, M] of x.T."""
        return self.smem["x_smem"].at[slot, :, pl.ds(tile * TILE, TILE)].transpose((1, 0))
