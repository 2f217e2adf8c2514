"""The chain in one kernel, by Pallas Mosaic GPU (Hopper): bound by reading the weights, which it never stops to do.

    warpgroups 0, 1   (consumers)   half of a unit's outputs each
    warpgroup 2       (weights)     TMA copies of tiles in the order of all products, as far ahead as its ring is long
    warpgroup 3       (rows)        TMA copies of what the products take, each after the product before is there

There is a CTA on every core; they wait for each other between products, while their rings fill. The transposed products are computed,
weight.T @ x.T: weights are the operand of 64 rows. What follows the sums, and the waiting, is PTX (`finish`), which the interpreter does
not have: there, each product is a kernel that returns its sums, and plain JAX does the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import _compat, row_copies
from pallas_kernels.product_chain import finish
from pallas_kernels.product_chain.finish import CHUNK, THREADS, Counters
from pallas_kernels.product_chain.plan import BLOCK, HALF, STEP, Chain, Product, chain_of, is_taken
from pallas_kernels.product_chain.weights import Weights
from pallas_kernels.row_copies import Rows

MAX_ROWS = 64
CONSUMERS = 2
"""Warpgroups that multiply."""
_WEIGHTS, _ROWS = CONSUMERS, CONSUMERS + 1
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 216
"""All begin with 128; a consumer that asks for more than the two others give back waits forever."""
_RING_BYTES = 216 << 10
"""Shared memory of both rings; a CTA has 227 KiB."""
_STAGE_BYTES = 2 * HALF * BLOCK * 2
_ROW_STAGES = {8: 4, 16: 4, 32: 3, 64: 2}
"""By padded rows: steps of x in shared memory."""


def supports(*, platform: str, dtype: DTypeLike, num_rows: int, widths: Sequence[int], interpret: bool = False) -> bool:
    """bfloat16, up to MAX_ROWS rows, widths of whole blocks."""
    is_there = (platform == "gpu" or interpret) and _compat.has_mosaic()
    return is_there and jnp.dtype(dtype) == jnp.bfloat16 and 1 <= num_rows <= MAX_ROWS and is_taken(widths)


def chain(
    x_TA: jax.Array,
    residual_TD: jax.Array,
    weights: Weights,
    *,
    eps: float,
    interpret: Any = False,
    num_ctas: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """As the package's. num_ctas: for tests; None: one for each core."""
    num_rows, (D, _, F) = x_TA.shape[0], weights.gate_up_DCF.shape
    x_TA, residual_TD = (jnp.pad(each, ((0, _num_padding(num_rows)), (0, 0))) for each in (x_TA, residual_TD))
    num_ctas = num_ctas or _compat.num_cores()
    plan = chain_of(
        inputs=x_TA.shape[1],
        width=D,
        hidden=F,
        qkv=None if weights.qkv_DQ is None else weights.qkv_DQ.shape[1],
        starts_with_out=weights.out_AD is not None,
        num_rows=x_TA.shape[0],
        eps=eps,
        num_ctas=num_ctas,
    )
    given = [weights.out_AD, weights.gate_up_DCF, weights.down_FD, weights.qkv_DQ]
    arrays: dict[str, jax.Array] = {"x": x_TA, "residual": residual_TD}
    arrays |= {f"weight{i}": weight for i, weight in enumerate(weight for weight in given if weight is not None)}
    norms = [norm for norm in (weights.mlp_norm_D, weights.next_norm_D) if norm is not None]
    normed = [i for i, product in enumerate(plan.products) if product.norms_next]
    arrays |= {f"norm_weight{i}": norm for i, norm in zip(normed, norms, strict=True)}
    found = _interpreted(plan, arrays, num_ctas, interpret) if interpret else _compiled(plan, arrays, num_ctas)
    last = len(plan.products) - 1
    h_TD, qkv_TQ = (found[f"out{last}"], None) if weights.qkv_DQ is None else (found[f"out{last - 1}"], found[f"out{last}"])
    return h_TD[:num_rows], None if qkv_TQ is None else qkv_TQ[:num_rows]


def _num_padding(num_rows: int) -> int:
    """Rows that copies ask for: they take fewer than a tile has, or whole tiles."""
    return 0 if num_rows < CHUNK else -num_rows % CHUNK


def results_of(plan: Chain, index: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes for a product, by name."""
    product, rows = plan.products[index], plan.padded_rows
    result = jax.ShapeDtypeStruct((plan.num_rows, product.num_outputs), jnp.bfloat16)
    found = {f"out{index}": result}
    if product.norms_next:
        found[f"normed{index}"] = result
        found[f"own_squares{index}"] = jax.ShapeDtypeStruct((product.num_outputs // HALF, rows), jnp.float32)
    if product.num_parts > 1:
        size = product.num_units * CONSUMERS * THREADS * finish.sums_per_thread(product, rows)
        found[f"parts{index}"] = jax.ShapeDtypeStruct((size,), jnp.float32)
    return found


def input_name(plan: Chain, index: int) -> str:
    """The name of what a product multiplies."""
    if index == 0:
        return "x"
    return f"normed{index - 1}" if plan.products[index - 1].norms_next else f"out{index - 1}"


def residual_name(plan: Chain, index: int) -> str:
    """The name of what is added to a product: the residual, or the sum before."""
    sums = [i for i, product in enumerate(plan.products[:index]) if product.adds_residual]
    return f"out{sums[-1]}" if sums else "residual"


def _compiled(plan: Chain, arrays: Mapping[str, jax.Array], num_ctas: int) -> dict[str, jax.Array]:
    counters = jnp.zeros((Counters(plan).num_words,), jnp.int32)
    results: dict[str, jax.ShapeDtypeStruct] = {}
    for index in range(len(plan.products)):
        results |= results_of(plan, index)
    plgpu = _compat.mosaic()
    scratch = {"scratch": plgpu.SMEM((CONSUMERS * finish.scratch_words(plan.padded_rows),), jnp.int32)}

    def finish_unit(refs: Mapping[str, Any], index: int, unit: Any, sums: Sequence[jax.Array]) -> None:
        product = plan.products[index]
        names = {
            "out": f"out{index}",
            "parts": f"parts{index}",
            "residual": residual_name(plan, index),
            "squares": f"own_squares{index - 1}",
            **{name: f"{name}{index}" for name in ("norm_weight", "normed", "own_squares")},
        }
        pointers = {name: refs[names.get(name, name)] for name in finish.finish_operands(product)}
        _finish(plan, index, pointers, unit, sums)

    def wait(refs: Mapping[str, Any], index: int) -> None:
        _inline(finish.await_product(("workspace",), plan, index), [refs["workspace"]])

    def leave(refs: Mapping[str, Any]) -> None:
        if len(plan.products) > 1:
            _inline(finish.leave(("workspace",), plan, num_ctas), [refs["workspace"]])

    given = {**arrays, "workspace": counters}
    return _launch(plan, range(len(plan.products)), given, results, scratch, num_ctas, (finish_unit, wait, leave, _fence), None)


def _launch(
    plan: Chain,
    indices: Sequence[int],
    arrays: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    num_ctas: int,
    hooks: tuple[Callable[..., None], ...],
    interpret: Any,
) -> dict[str, jax.Array]:
    """Some products of the chain in one kernel; its results by name.

    hooks: what is done with a unit's sums, before a product, at the end, and before the tensor cores take what was waited for.
    """
    plgpu = _compat.mosaic()
    rows, row_stages = plan.padded_rows, _ROW_STAGES[plan.padded_rows]
    num_stages = (_RING_BYTES - row_stages * rows * STEP * 2) // _STAGE_BYTES
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
        _Kernel(plgpu, plan, tuple(indices), num_ctas, named, hooks).run()

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
    """Of the products that it computes."""
    num_ctas: int
    refs: Mapping[str, Any]
    hooks: tuple[Callable[..., None], ...]

    def run(self) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg < CONSUMERS)
        def _():
            self.plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            self.consume(wg)

        @pl.when(wg == _WEIGHTS)
        def _():
            self.plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            self.copy_weights()

        @pl.when(wg == _ROWS)
        def _():
            self.plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
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
        """What the consumers still release must have arrived before the barriers go."""
        free = self.refs[f"{name}_free"]

        @pl.loop(jnp.maximum(total - free.shape[0], 0), total)
        def _(number):
            self.plgpu.barrier_wait(free.at[lax.rem(number, free.shape[0])])

    # Copies

    def copy_weights(self) -> None:
        *products, (_, _, total) = self.in_order(_tiles_of_unit)
        for index, product, before in products:
            self._copy_weight(self.refs[f"weight{index}"], product, before)
        self.drain("tiles", total)

    def _copy_weight(self, weight_ref: Any, product: Product, before: Any) -> None:
        steps = _tiles_of_unit(product)

        @pl.loop(0, self.num_own(product) * steps)
        def _(step):
            slot = self.take_slot("tiles", before + step)
            unit, number = self.unit(step // steps), lax.rem(step, steps)
            block, part = unit // product.num_parts, lax.rem(unit, product.num_parts)
            outputs = pl.ds(block * BLOCK, BLOCK)
            for i in range(2):
                # Of a gated product the tiles of gate and up, else two that follow each other.
                rows = part * steps + number if product.gated else (part * steps + number) * 2 + i
                after = (i, outputs) if product.gated else (outputs,)
                target = self.refs["tiles"].at[slot, i]
                row_copies.load(weight_ref, Rows(rows, HALF, HALF), target, self.refs["tiles_full"].at[slot], after=after)

    def copy_rows(self) -> None:
        _, wait, leave, _ = self.hooks
        *products, (_, _, total) = self.in_order(lambda product: product.num_steps)
        for index, product, before in products:
            if index != self.indices[0]:
                wait(self.refs, index - 1)
            self._copy_input(self.refs[input_name(self.plan, index)], product, before)
        leave(self.refs)
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
                self.hooks[0](self.refs, index, self.unit(turn), sums)

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
                    self.hooks[3]()
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


def _finish(plan: Chain, index: int, pointers: Mapping[str, Any], unit: Any, sums: Sequence[jax.Array]) -> None:
    plgpu = _compat.mosaic()
    count = finish.sums_per_thread(plan.products[index], plan.padded_rows)
    text = finish.finish(("unit", *pointers, *(f"sum{i}" for i in range(count))), plan, index)
    layouts = [plgpu.Layout.WG_SPLAT(()), *[plgpu.Layout.WGMMA] * len(sums)]
    _inline(text, list(pointers.values()), [unit, *sums], layouts)


def _fence() -> None:
    """Before products that follow a wait: else the assembler does it, and makes them wait for each other."""
    _inline("wgmma.fence.sync.aligned;", [])


def _inline(text: str, refs: Sequence[Any], values: Sequence[Any] = (), layouts: Sequence[Any] = ()) -> None:
    """A block of PTX. Operands: the first value, pointers to the references, and the registers of the other values, chunk by chunk."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    plgpu = _compat.mosaic()

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType() for _ in refs], list(layouts)))
    def body(_: Any, references: Sequence[Any], arrays: Sequence[Any]) -> None:
        pointers = [utils.memref_ptr(reference) for reference in references]
        kinds = ["l" if llvm.PointerType(pointer.type).address_space in (0, 1) else "r" for pointer in pointers]
        first = [array.registers.item() for array in arrays[:1]]
        registers = []
        for array in arrays[1:]:
            for pairs in by_chunk(array.registers):
                registers += [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
        operands, constraints = [*first, *pointers, *registers], ["r"] * len(first) + kinds + ["f"] * len(registers)
        options: dict[str, Any] = {"has_side_effects": True, "convergent": True}  # barriers stay where they are
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, ",".join([*constraints, "~{memory}"]), **options)

    body(list(refs), list(values))


# In the interpreter


def _interpreted(plan: Chain, arrays: Mapping[str, jax.Array], num_ctas: int, interpret: Any) -> dict[str, jax.Array]:
    """Each product by a kernel of its own, which returns sums; the rest as `finish` does it, in plain JAX."""
    params = _compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    found = dict(arrays)

    def keep(refs: Mapping[str, Any], index: int, unit: Any, sums: Sequence[jax.Array]) -> None:
        num_parts = plan.products[index].num_parts
        outputs = pl.ds(unit // num_parts * BLOCK + lax.axis_index("wg") * HALF, HALF)
        for i, each in enumerate(sums):
            refs["sums"][lax.rem(unit, num_parts), i, outputs] = each

    def nothing(*_: Any) -> None:
        pass

    for index, product in enumerate(plan.products):
        shape = product.num_parts, product.num_sums, product.num_outputs, plan.padded_rows
        result = {"sums": jax.ShapeDtypeStruct(shape, jnp.float32)}
        given = {name: found[name] for name in (input_name(plan, index), f"weight{index}")}
        sums = _launch(plan, (index,), given, result, {}, num_ctas, (keep, nothing, nothing, nothing), params)["sums"]
        found |= _finished(plan, index, sums[..., : plan.num_rows], found)
    return found


def _finished(plan: Chain, index: int, sums: jax.Array, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """sums: float32 [parts, sums of an output, outputs, rows]. Squares: float32 [rows]."""
    product = plan.products[index]
    totals = [sums[:, i].sum(axis=0).T for i in range(product.num_sums)]
    if product.is_normed:
        mean = arrays[f"own_squares{index - 1}"] / plan.products[index - 1].num_outputs
        totals = [total * lax.rsqrt(mean + plan.eps)[:, None] for total in totals]
    result = jax.nn.silu(totals[0]) * totals[1] if product.gated else totals[0]
    if product.adds_residual:
        result += arrays[residual_name(plan, index)].astype(jnp.float32)
    out = result.astype(jnp.bfloat16)
    found = {f"out{index}": out}
    if product.norms_next:
        wide = out.astype(jnp.float32)
        normed = wide * arrays[f"norm_weight{index}"].astype(jnp.float32)
        found |= {f"normed{index}": normed.astype(jnp.bfloat16), f"own_squares{index}": jnp.square(wide).sum(axis=1)}
    return found


def by_chunk(registers: Any) -> list[list[Any]]:
    """Registers of [64, rows] in the layout WGMMA: of each CHUNK rows the two, 8 outputs apart."""
    import numpy as np

    found: list[list[Any]] = [[None, None] for _ in range(registers.shape[1])]
    for index in np.ndindex(registers.shape):
        (half,) = (i for i, size in zip(index[2:], registers.shape[2:], strict=True) if size == 2)
        found[index[1]][half] = registers[index]
    return found
