"""The kernel that multiplies: rings of tiles and of rows in shared memory, and the warpgroups that fill and empty them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat, row_copies
from pallas_kernels.product_chain.plan import BLOCK, HALF, STEP, Chain, Product
from pallas_kernels.row_copies import Rows

CONSUMERS = 2
"""Warpgroups that multiply."""
_WEIGHTS, _ROWS = CONSUMERS, CONSUMERS + 1
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 200
"""All begin with 128; a consumer that asks for more than the two others give back waits forever."""
RING_BYTES = 216 << 10
"""Shared memory of both rings; a CTA has 227 KiB."""
STAGE_BYTES = 2 * HALF * BLOCK * 2
"""Two tiles, which are copied together."""
AHEAD = 6
"""Copies whose tiles are asked for ahead, into the cache, when a product's first begin: a wait may take longer than the ring lasts."""
ROW_STAGES = {8: 4, 16: 4, 32: 3, 64: 2}
"""By padded rows: steps of x in shared memory."""


@dataclass(frozen=True)
class Surroundings:
    """Parts of the kernel that the interpreter does not have, or their substitutes. `refs` are its references by name."""

    finish: Callable[[Mapping[str, Any], int, Any, Sequence[jax.Array]], None]
    """Takes refs, the number of a product, a unit, and its sums."""
    wait: Callable[[Mapping[str, Any], int], None]
    """Takes refs and the number of a product, which is then there."""
    leave: Callable[[Mapping[str, Any]], None]
    """Called after the last wait."""
    fence: Callable[[], None]
    """Called before the tensor cores take what was waited for."""
    prefetch: Callable[[Any], None]
    """Brings a part of a weight into the cache."""
    prefetch_upcoming: Callable[[Mapping[str, Any]], None]
    """Takes refs, after the last copy of a weight has begun."""


def input_name(plan: Chain, index: int) -> str:
    """The name of what a product multiplies."""
    if index == 0:
        return "x"
    return f"normed{index - 1}" if plan.products[index - 1].norms_next else f"out{index - 1}"


def launch(
    plan: Chain,
    indices: Sequence[int],
    arrays: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    num_ctas: int,
    surroundings: Surroundings,
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """Some products of the chain in one kernel; its results by name. scratch: more shared memory."""
    plgpu = _compat.mosaic()
    rows, row_stages = plan.padded_rows, ROW_STAGES[plan.padded_rows]
    num_stages = (RING_BYTES - row_stages * rows * STEP * 2) // STAGE_BYTES
    swizzled = (plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(128))
    smem = {
        "tiles": plgpu.SMEM((num_stages, 2, HALF, BLOCK), jnp.bfloat16, transforms=swizzled),
        "rows": plgpu.SMEM((row_stages, rows, STEP), jnp.bfloat16, transforms=swizzled),
        "tiles_full": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "tiles_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=num_stages),
        "rows_full": plgpu.Barrier(num_arrivals=1, num_barriers=row_stages),
        "rows_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=row_stages),
        **scratch,
    }

    def body(*refs: Any) -> None:
        named = dict(zip((*arrays, *results, *smem), refs, strict=True))
        _Kernel(plgpu, plan, tuple(indices), num_ctas, named, surroundings).run()

    found = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=list(smem.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*arrays.values())
    return dict(zip(results, found, strict=True))


@dataclass(frozen=True)
class _Kernel:
    """The kernel's references and sizes."""

    plgpu: Any
    plan: Chain
    indices: tuple[int, ...]
    """Numbers of the products that it computes."""
    num_ctas: int
    refs: Mapping[str, Any]
    surroundings: Surroundings

    def run(self) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg < CONSUMERS)
        def _():
            self.plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            self.consume(wg)

        @pl.when(wg == _WEIGHTS)
        def _():
            self.plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            self.copy_weights()

        @pl.when(wg == _ROWS)
        def _():
            self.plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            self.copy_rows()

    def num_own(self, product: Product) -> Any:
        """Units of a product that this CTA computes."""
        return (product.num_units - lax.axis_index("cta") + self.num_ctas - 1) // self.num_ctas

    def unit(self, turn: Any) -> Any:
        return lax.axis_index("cta") + turn * self.num_ctas

    def in_order(self, steps_of: Callable[[Product], int]) -> list[tuple[int, Product, Any]]:
        """(index, product, the steps of this CTA before it), and a last entry with the steps of all; steps_of: of a unit."""
        found, before = [], jnp.int32(0)
        for index in self.indices:
            product = self.plan.products[index]
            found.append((index, product, before))
            before = before + self.num_own(product) * steps_of(product)
        return [*found, (len(self.plan.products), Product(0, 0), before)]

    def take_slot(self, name: str, number: Any) -> Any:
        """The place in a ring of a copy, once it is free."""
        free = self.refs[f"{name}_free"]
        slot = lax.rem(number, free.shape[0])
        pl.when(number >= free.shape[0])(lambda: self.plgpu.barrier_wait(free.at[slot]))
        return slot

    def drain(self, name: str, total: Any) -> None:
        """Wait for all that consumers release: it must have arrived before the barriers go."""
        free = self.refs[f"{name}_free"]

        @pl.loop(jnp.maximum(total - free.shape[0], 0), total)
        def _(number):
            self.plgpu.barrier_wait(free.at[lax.rem(number, free.shape[0])])

    # Copies

    def copy_weights(self) -> None:
        *products, (_, _, total) = self.in_order(_tiles_of_unit)
        for position, (index, product, before) in enumerate(products):
            self._copy_weight(self.refs[f"weight{index}"], product, before, self._first_ahead(position))
        self.surroundings.prefetch_upcoming(self.refs)
        self.drain("tiles", total)

    def _first_ahead(self, position: int) -> int:
        """The first copy of a product that waits for a consumer: the ring holds those before, or those of the first products."""
        num_slots = self.refs["tiles"].shape[0]
        earlier = sum(_tiles_of_unit(self.plan.products[index]) for index in self.indices[:position])
        return num_slots - earlier if earlier < num_slots else num_slots

    def _copy_weight(self, weight_ref: Any, product: Product, before: Any, first_ahead: int) -> None:
        num_own = self.num_own(product) * _tiles_of_unit(product)

        @pl.loop(jnp.minimum(first_ahead, num_own), jnp.minimum(first_ahead + AHEAD, num_own))
        def _(step):
            for rows, after in self._tiles(product, step):
                self.surroundings.prefetch(weight_ref.at[(rows.slice(), *after)])

        @pl.loop(0, num_own)
        def _(step):
            slot = self.take_slot("tiles", before + step)
            for i, (rows, after) in enumerate(self._tiles(product, step)):
                row_copies.load(weight_ref, rows, self.refs["tiles"].at[slot, i], self.refs["tiles_full"].at[slot], after=after)

    def _tiles(self, product: Product, step: Any) -> list[tuple[Rows, tuple[Any, ...]]]:
        """Where the tiles of a copy lie in the weight: of a gated product those of gate and up, else two that follow each other."""
        steps = _tiles_of_unit(product)
        unit, number = self.unit(step // steps), lax.rem(step, steps)
        block, part = unit // product.num_parts, lax.rem(unit, product.num_parts)
        first, outputs = part * steps + number, pl.ds(block * BLOCK, BLOCK)
        if product.gated:
            return [(Rows(first, HALF, HALF), (i, outputs)) for i in range(2)]
        return [(Rows(first * 2 + i, HALF, HALF), (outputs,)) for i in range(2)]

    def copy_rows(self) -> None:
        *products, (_, _, total) = self.in_order(lambda product: product.num_steps)
        for index, product, before in products:
            if index != self.indices[0]:
                self.surroundings.wait(self.refs, index - 1)
            self._copy_input(self.refs[input_name(self.plan, index)], product, before)
        self.surroundings.leave(self.refs)
        self.drain("rows", total)

    def _copy_input(self, x_ref: Any, product: Product, before: Any) -> None:
        padded = self.plan.padded_rows

        @pl.loop(0, self.num_own(product) * product.num_steps)
        def _(step):
            slot = self.take_slot("rows", before + step)
            unit, number = self.unit(step // product.num_steps), lax.rem(step, product.num_steps)
            first = lax.rem(unit, product.num_parts) * product.num_steps + number
            # Rows past the last are zeros. That the start is not known keeps them from being refused.
            rows = Rows(jnp.minimum(step, 0), padded, padded)
            target, inputs = self.refs["rows"].at[slot], pl.ds(first * STEP, STEP)
            row_copies.load(x_ref, rows, target, self.refs["rows_full"].at[slot], after=(inputs,))

    # Products

    def consume(self, wg: Any) -> None:
        tiles, rows = self.in_order(_tiles_of_unit), self.in_order(lambda product: product.num_steps)
        for (index, product, tile), (_, _, row) in zip(tiles[:-1], rows[:-1], strict=True):

            @pl.loop(0, self.num_own(product))
            def _(turn, index=index, product=product, tile=tile, row=row):
                first_tile, first_row = tile + turn * _tiles_of_unit(product), row + turn * product.num_steps
                sums = self.sums(wg, product, first_tile, first_row)
                self.surroundings.finish(self.refs, index, self.unit(turn), sums)

    def sums(self, wg: Any, product: Product, first_tile: Any, first_row: Any) -> list[jax.Array]:
        """float32 [64 outputs, rows] of a unit, one of gate and one of up if it is gated."""
        plgpu, refs = self.plgpu, self.refs
        num_slots, num_row_slots = refs["tiles"].shape[0], refs["rows"].shape[0]
        per_step = 2 if product.gated else 1

        def multiply(*sum_refs: Any) -> list[jax.Array]:
            @pl.loop(0, product.num_steps)
            def _(step):
                row_slot = lax.rem(first_row + step, num_row_slots)
                plgpu.barrier_wait(refs["rows_full"].at[row_slot])
                for j in range(per_step):
                    slot = lax.rem(first_tile + step * per_step + j, num_slots)
                    plgpu.barrier_wait(refs["tiles_full"].at[slot])
                    self.surroundings.fence()
                    for i in range(2):
                        x = refs["rows"].at[row_slot, :, pl.ds((j if product.gated else i) * HALF, HALF)].transpose((1, 0))
                        plgpu.wgmma(sum_refs[i if product.gated else 0], self.tile(slot, i, wg), x)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(refs["tiles_free"].at[slot])
                plgpu.barrier_arrive(refs["rows_free"].at[row_slot])

            return [sum_ref[...] for sum_ref in sum_refs]

        shape = HALF, self.plan.padded_rows
        return pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * product.num_sums)  # type: ignore[no-any-return]

    def tile(self, slot: Any, i: int, wg: Any) -> Any:
        """[64 outputs, 64 inputs]"""
        return self.refs["tiles"].at[slot, i, :, pl.ds(wg * HALF, HALF)].transpose((1, 0))


def _tiles_of_unit(product: Product) -> int:
    """Pairs of tiles that are copied for a unit."""
    return product.num_steps * product.num_sums
