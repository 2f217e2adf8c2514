"""A grouped product with packed weights, by Pallas Mosaic GPU (Hopper): tiles of rows, each with the weights of its expert.

    warpgroups 0 ...  (consumers)   blocks of 64 outputs: one of gate and the same of up, or one or two of down
    the last          (producer)    TMA copies of words, scales, zeros and x in steps of inputs, into a ring of shared memory

A CTA per core stays for the whole launch and walks through items (tile of rows x blocks of outputs), blocks first, so that CTAs that
run at a time share rows of x in the cache. The transposed product is computed, weight @ x.T, and transposed on its way through shared
memory.

A tile of few rows is bound by reading and decoding weights: its steps are long, so that many bytes are in flight, and four consumers
share the inputs of one block, so that there are items for all cores. With many rows a consumer has two products a step: one of them is
decoded while the tensor cores compute the other. What lies outside of an array a copy fills with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat, producer_consumer, row_copies
from pallas_kernels.grouped_matmul.packed import PackedExperts
from pallas_kernels.grouped_matmul.triton_rows import SortedRows
from pallas_kernels.quantized_matmul.cta import RESERVED_BYTES, SMEM_BYTES
from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, by_rows, of_tile, operand, unfolded, word_rows
from pallas_kernels.quantized_matmul.packed import TILE
from pallas_kernels.row_copies import Rows

ALIGNMENT = 8  # rows of a swizzle tile
OVERLAPPED = 2
"""Products of a step in which one is decoded while the other is computed. Registers that a product in flight still reads belong to the
other one: with another number they could be written again too early, which nothing reports (results are wrong)."""
_MAX_STAGES = 12
_FEW_ROWS, _MIDDLE_ROWS = 16, 32
_FEW_BLOCKS = 16
"""Blocks of outputs of gate: up to so many, the experts of a token have too few items for all cores unless an item is one block."""
_STEP_BYTES = 32 << 10
"""Of words, up to _MIDDLE_ROWS."""


@dataclass(frozen=True)
class Sizes:
    """How consumers divide an item, and the ring of shared memory."""

    num_stages: int
    step_tiles: int
    """Tiles of inputs of a step."""
    blocks: int = 1
    """Blocks of each matrix that a consumer computes."""
    num_consumers: int = 2
    num_shares: int = 1
    """Consumers that share the inputs of the same blocks; the first of them adds the sums of the others to its own."""

    @property
    def num_owners(self) -> int:
        """Consumers with blocks of their own."""
        return self.num_consumers // self.num_shares


def pick_sizes(tile_rows: int, weight: PackedExperts) -> Sizes:
    """The forms that were the fastest on an H100 with the experts of Qwen3-30B-A3B and gpt-oss-20b; as many stages as fit."""
    num_matrices, num_blocks = _num_matrices(weight), weight.shape[-2] // TILE
    tile_bytes = TILE * TILE * DECODERS[weight.packed.number].bits // 8
    if tile_rows > _MIDDLE_ROWS:
        sizes = Sizes(0, 1, blocks=OVERLAPPED // num_matrices)
    elif tile_rows > _FEW_ROWS or num_matrices == 1:
        sizes = Sizes(0, min(4, _STEP_BYTES // (2 * num_matrices * tile_bytes)))
    else:
        num_shares = 4 if num_blocks <= _FEW_BLOCKS else 2
        sizes = Sizes(0, 4 if num_shares == 4 else _STEP_BYTES // (4 * tile_bytes), num_consumers=4, num_shares=num_shares)
    return fitted(sizes, tile_rows, weight)


def fitted(sizes: Sizes, tile_rows: int, weight: PackedExperts) -> Sizes:
    """With as many stages as fit into shared memory."""
    bits = DECODERS[weight.packed.number].bits
    products = _num_matrices(weight) * sizes.blocks
    stage = sizes.num_owners * products * sizes.step_tiles * TILE * TILE * bits // 8
    stage += sum(
        sizes.num_owners * products * TILE * _num_groups(weight, sizes.step_tiles) * vector.dtype.itemsize
        for vector in _vectors(weight).values()
    )
    stage += 2 * tile_rows * TILE * sizes.step_tiles
    results = 2 * sizes.num_owners * sizes.blocks * tile_rows * TILE
    shared = 4 * (sizes.num_consumers - sizes.num_owners) * products * tile_rows * TILE
    return replace(sizes, num_stages=min(_MAX_STAGES, (SMEM_BYTES - RESERVED_BYTES - results - shared) // stage))


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
    assert tile_rows % ALIGNMENT == 0 and x_SK.shape[1] == num_inputs, f"{tile_rows} rows of a tile, x {x_SK.shape}"
    assert sizes.step_tiles % sizes.num_shares == 0, f"{sizes}"

    scratch = _scratch(weight, sizes, tile_rows, x_SK.dtype, is_interpreted=bool(interpret))

    def body(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        of_groups, refs = refs[: len(vectors)], refs[len(vectors) :]
        of_outputs, refs = refs[: len(by_output)], refs[len(by_output) :]
        expert_ref, start_ref, count_ref, num_tiles_ref, out_ref, *others = refs
        _Grouped(
            plgpu=plgpu,
            number=weight.packed.number,
            group=_group(weight),
            fold=weight.packed.fold,
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
        num_threads=sizes.num_consumers + 1,
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


def _scratch(weight: PackedExperts, sizes: Sizes, tile_rows: int, dtype: Any, *, is_interpreted: bool) -> dict[str, Any]:
    """Shared memory and barriers of a CTA, by name. dtype: of x."""
    plgpu, vectors = _compat.mosaic(), _vectors(weight)
    num_matrices, rows_of_tile = _num_matrices(weight), word_rows(DECODERS[weight.packed.number].bits)
    products = num_matrices * sizes.blocks

    def swizzled(*shape: int) -> Any:
        transforms = (plgpu.TilingTransform((ALIGNMENT, TILE)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    stages = sizes.num_stages
    ring = stages, sizes.num_owners, products
    scratch = {
        "words_smem": plgpu.SMEM((*ring, sizes.step_tiles * rows_of_tile, WORD_COLUMNS), jnp.int32),
        "x_smem": swizzled(stages, tile_rows, sizes.step_tiles * TILE),
        "out_smem": swizzled(sizes.num_owners, sizes.blocks, tile_rows, TILE),
        "full": plgpu.Barrier(num_arrivals=1 + sizes.num_owners * products * (1 + len(vectors)), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=sizes.num_consumers, num_barriers=stages),
    }
    if sizes.num_shares > 1:
        others = sizes.num_shares - 1
        scratch["sums_smem"] = plgpu.SMEM((sizes.num_owners, others, products, TILE, tile_rows), jnp.float32)
        scratch["summed"] = plgpu.Barrier(num_arrivals=others, num_barriers=sizes.num_owners)
        scratch["taken"] = plgpu.Barrier(num_arrivals=1, num_barriers=sizes.num_owners)
    scratch |= {
        f"{name}_smem": plgpu.SMEM((*ring, _num_groups(weight, sizes.step_tiles), TILE), vector.dtype)
        for name, vector in vectors.items()
    }
    if is_interpreted:
        scratch["interpreted_smem"] = plgpu.SMEM((sizes.num_consumers, TILE, TILE), dtype)
    return scratch


@dataclass(frozen=True)
class _Grouped:
    """The kernel's references and sizes. A product is of a block of a matrix: matrix * sizes.blocks + block of the consumer."""

    plgpu: Any
    number: str
    group: int | None
    fold: int
    """Power of two by which stored scales are larger, see `fold_of`."""
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
        producer_consumer.run(self.sizes.num_consumers, self.consume, self.produce)

    @property
    def num_blocks(self) -> int:
        """Blocks of outputs."""
        return self.out_ref.shape[1] // TILE

    @property
    def num_parts(self) -> int:
        """Items of a tile of rows."""
        return pl.cdiv(self.num_blocks, self.sizes.num_owners * self.sizes.blocks)

    def num_my_items(self) -> Any:
        num_items = self.num_tiles_ref[0] * self.num_parts
        return lax.div(num_items - lax.axis_index("cta") + (self.num_ctas - 1), self.num_ctas)

    def item(self, turn: Any) -> tuple[Any, Any]:
        """The tile of rows, and the first block of outputs."""
        index = turn * self.num_ctas + lax.axis_index("cta")
        return lax.div(index, self.num_parts), lax.rem(index, self.num_parts) * (self.sizes.num_owners * self.sizes.blocks)

    def block(self, first: Any, owner: Any, own: int) -> Any:
        """An owner's own block; past the last for one that has none."""
        return first + owner * self.sizes.blocks + own

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
                for owner in range(self.sizes.num_owners):
                    for matrix in range(self.num_matrices):
                        for own in range(self.sizes.blocks):
                            self.load_block(slot, step, owner, expert, matrix, own, self.block(first, owner, own))
                inputs = pl.ds(step * self.sizes.step_tiles * TILE, self.sizes.step_tiles * TILE)
                rows = Rows(start, ALIGNMENT, self.tile_rows)
                row_copies.load(self.x_ref, rows, self.smem["x_smem"].at[slot], self.smem["full"].at[slot], after=(inputs,))

        # What the consumers still release must have arrived before the barriers go.
        num_all = num_items * self.num_steps

        @pl.loop(jnp.maximum(num_all - stages, 0), num_all)
        def _(index):
            self.plgpu.barrier_wait(free.at[self.slot(index)])

    def load_block(self, slot: Any, step: Any, owner: int, expert: Any, matrix: int, own: int, block: Any) -> None:
        """A step's words, scales and zeros of a block of outputs."""
        full, product = self.smem["full"].at[slot], matrix * self.sizes.blocks + own
        index = expert * self.num_matrices + matrix
        words_smem = self.smem["words_smem"].at[slot, owner, product]
        size = words_smem.shape[0]
        row_copies.load(self.words_ref, Rows(step, size, size), words_smem, full, before=(index * self.num_blocks + block,))
        for name, ref in self.vector_refs.items():
            target = self.smem[f"{name}_smem"].at[slot, owner, product]
            rows = self.groups(step, target.shape[0])
            row_copies.load(ref, rows, target, full, before=(index,), after=(pl.ds(block * TILE, TILE),))

    def groups(self, step: Any, size: int) -> Rows:
        """The groups of a step."""
        assert self.group is not None
        inputs = self.sizes.step_tiles * TILE
        return Rows(lax.div(step * inputs, max(self.group, inputs)), size, size)

    # Consumers

    def consume(self, wg: Any) -> None:
        num_shares, num_items = self.sizes.num_shares, self.num_my_items()
        owner, share = (wg, 0) if num_shares == 1 else (lax.div(wg, num_shares), lax.rem(wg, num_shares))

        @pl.loop(0, num_items)
        def _(turn):
            sums = self.multiply(owner, share, turn)
            if num_shares == 1:
                self.finish_all(owner, sums, turn)
                return

            @pl.when(share == 0)
            def _():
                self.finish_all(owner, self.with_others(owner, sums), turn)

            @pl.when(share > 0)
            def _():
                pl.when(turn > 0)(lambda: self.plgpu.barrier_wait(self.smem["taken"].at[owner]))
                for product, value in enumerate(sums):
                    self.smem["sums_smem"].at[owner, share - 1, product][...] = value
                self.plgpu.barrier_arrive(self.smem["summed"].at[owner])

        if num_shares > 1:
            # What the first has taken must have been told before the barriers go.
            @pl.when((share > 0) & (num_items > 0))
            def _():
                self.plgpu.barrier_wait(self.smem["taken"].at[owner])

        self.plgpu.wait_smem_to_gmem(0)

    def with_others(self, owner: Any, sums: list[jax.Array]) -> list[jax.Array]:
        """The sums of all shares, added in their order."""
        plgpu, sums = self.plgpu, list(sums)
        plgpu.barrier_wait(self.smem["summed"].at[owner])
        for other in range(self.sizes.num_shares - 1):
            for product in range(len(sums)):
                source = self.smem["sums_smem"].at[owner, other, product]
                sums[product] += plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.barrier_arrive(self.smem["taken"].at[owner])
        return sums

    def finish_all(self, owner: Any, sums: list[jax.Array], turn: Any) -> None:
        tile, first = self.item(turn)
        self.plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for own in range(self.sizes.blocks):
            self.finish(owner, own, sums[own :: self.sizes.blocks], tile, self.block(first, owner, own))

    def finish(self, owner: Any, own: int, sums: list[jax.Array], tile: Any, block: Any) -> None:
        """Factor, bias, combination and store of a block of outputs."""
        plgpu, expert = self.plgpu, self.expert_ref[tile]
        # An owner without a block reads the factors of the last.
        outputs = pl.ds(jnp.minimum(block, self.num_blocks - 1) * TILE, TILE)
        values = []
        for matrix, value in enumerate(sums):
            for name, apply in (("factor", jnp.multiply), ("bias", jnp.add)):
                if name in self.output_refs:
                    source = self.output_refs[name].at[expert * self.num_matrices + matrix, outputs]
                    vector = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
                    value = apply(value, by_rows(vector, self.tile_rows))
            values.append(value)
        out_smem = self.smem["out_smem"].at[owner, own]
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

    def multiply(self, owner: Any, share: Any, turn: Any) -> list[jax.Array]:
        """float32 [64, rows] for each of a consumer's products of its share of the inputs, without the factor."""
        plgpu, full, begin = self.plgpu, self.smem["full"], turn * self.num_steps
        num_products = self.num_matrices * self.sizes.blocks

        def overlapped(*sum_refs: Any) -> list[jax.Array]:
            @pl.loop(0, self.num_steps)
            def _(step):
                slot = self.slot(begin + step)
                plgpu.barrier_wait(full.at[slot])
                for place, (tile, product) in enumerate(self.order()):
                    a = self.operand(owner, share, slot, product, tile)
                    plgpu.wgmma_wait(0)
                    if place == 0:
                        pl.when(step > 0)(partial(self.release, begin + step - 1))
                    plgpu.wgmma(sum_refs[product], a, self.x_tile(slot, share, tile))

            plgpu.wgmma_wait(0)
            self.release(begin + self.num_steps - 1)
            return [unfolded(sum_ref[...], self.number, self.fold) for sum_ref in sum_refs]

        def in_turn(*sum_refs: Any) -> list[jax.Array]:
            @pl.loop(0, self.num_steps)
            def _(step):
                slot = self.slot(begin + step)
                plgpu.barrier_wait(full.at[slot])
                for tile, product in self.order():
                    a = self.operand(owner, share, slot, product, tile)
                    plgpu.wgmma(sum_refs[product], a, self.x_tile(slot, share, tile))
                plgpu.wgmma_wait(0)  # before registers of operands are written again
                self.release(begin + step)

            return [unfolded(sum_ref[...], self.number, self.fold) for sum_ref in sum_refs]

        form = overlapped if len(self.order()) == OVERLAPPED else in_turn
        return pl.run_scoped(form, *[plgpu.ACC((TILE, self.tile_rows), jnp.float32) for _ in range(num_products)])

    @property
    def share_tiles(self) -> int:
        """Tiles of inputs of a consumer's share of a step."""
        return self.sizes.step_tiles // self.sizes.num_shares

    def order(self) -> list[tuple[int, int]]:
        """Tiles of inputs and products of a consumer's share of a step."""
        products = range(self.num_matrices * self.sizes.blocks)
        return [(tile, product) for tile in range(self.share_tiles) for product in products]

    def release(self, index: Any) -> None:
        """Release the slot that this consumer has read."""
        self.plgpu.barrier_arrive(self.smem["free"].at[self.slot(index)])

    def x_tile(self, slot: Any, share: Any, tile: int) -> Any:
        """[64, rows] of x.T."""
        first = (share * self.share_tiles + tile) * TILE
        return self.smem["x_smem"].at[slot, :, pl.ds(first, TILE)].transpose((1, 0))

    def operand(self, owner: Any, share: Any, slot: Any, product: int, tile: int) -> Any:
        """A tile of the weight for wgmma."""
        scales, zeros = (
            self.vectors(self.smem[f"{name}_smem"].at[slot, owner, product], share, tile) if name in self.vector_refs else []
            for name in ("scale", "zero")
        )
        words_smem = self.smem["words_smem"].at[slot, owner, product]
        if self.sizes.num_shares > 1:
            size = words_smem.shape[0] // self.sizes.num_shares
            words_smem = words_smem.at[pl.ds(share * size, size)]
        interpreted = self.smem.get("interpreted_smem")
        if interpreted is not None:
            interpreted = interpreted.at[owner * self.sizes.num_shares + share]
        return operand(self.number, words_smem, tile, scales, zeros, interpreted, fold=self.fold)

    def vectors(self, vectors_smem: Any, share: Any, tile: int) -> list[jax.Array]:
        """Scales or zeros of a tile, of those of a step."""
        group, inputs = self.group or self.sizes.step_tiles * TILE, self.share_tiles * TILE
        if self.sizes.num_shares > 1:
            num_groups = max(1, inputs // group)
            first = share * num_groups if group <= inputs else lax.div(share * inputs, group)
            vectors_smem = vectors_smem.at[pl.ds(first, num_groups)]
        return of_tile(vectors_smem, min(group, inputs), tile)
