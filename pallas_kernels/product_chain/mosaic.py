"""The chain in one kernel, by Pallas Mosaic GPU (Hopper): bound by reading the weights, which it never stops to do.

    warpgroups 0, 1   (consumers)   half of a unit's outputs each
    warpgroup 2       (weights)     TMA copies of tiles in the order of all products, as far ahead as its ring is long
    warpgroup 3       (rows)        TMA copies of what the products take, each after the product before is there

There is a CTA on every core; they wait for each other between products, while their rings fill. The transposed products are computed,
weight.T @ x.T: weights are the operand of 64 rows. What follows the sums, and the waiting, is PTX (`finish`), which the interpreter does
not have: there, each product is a kernel that returns its sums, and plain JAX does the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.product_chain import finish, waiting
from pallas_kernels.product_chain.finish import CHUNK, THREADS
from pallas_kernels.product_chain.plan import BLOCK, HALF, Chain, chain_of, is_taken
from pallas_kernels.product_chain.streams import CONSUMERS, Surroundings, input_name, launch
from pallas_kernels.product_chain.waiting import Counters
from pallas_kernels.product_chain.weights import Weights

MAX_ROWS = 64


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
    upcoming: Sequence[jax.Array] = (),
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
    if interpret:
        found = _interpreted(plan, arrays, num_ctas, interpret)
    else:
        found = _compiled(plan, arrays | {f"upcoming{i}": array for i, array in enumerate(upcoming)}, num_ctas)
    last = len(plan.products) - 1
    h_TD, qkv_TQ = (found[f"out{last}"], None) if weights.qkv_DQ is None else (found[f"out{last - 1}"], found[f"out{last}"])
    return h_TD[:num_rows], None if qkv_TQ is None else qkv_TQ[:num_rows]


def _num_padding(num_rows: int) -> int:
    """Rows that copies ask for: they take fewer than a tile has, or whole tiles."""
    return 0 if num_rows < CHUNK else -num_rows % CHUNK


def results_of(plan: Chain, index: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays that the kernel writes for a product, by name."""
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
        _inline(waiting.await_product(("workspace",), plan, index), [refs["workspace"]])

    def leave(refs: Mapping[str, Any]) -> None:
        if len(plan.products) > 1:
            _inline(waiting.leave(("workspace",), plan, num_ctas), [refs["workspace"]])

    def prefetch_upcoming(refs: Mapping[str, Any]) -> None:
        sizes = {name: array.nbytes for name, array in arrays.items() if name.startswith("upcoming")}
        if sizes:
            _inline(waiting.prefetch(sizes, num_ctas), [refs[name] for name in sizes])

    given = {**arrays, "workspace": counters}
    surroundings = Surroundings(finish_unit, wait, leave, _fence, plgpu.async_prefetch, prefetch_upcoming)
    return launch(plan, range(len(plan.products)), given, results, scratch, num_ctas, surroundings)


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
    """Each product by a separate kernel, which returns sums; the rest as `finish` does it, in plain JAX."""
    params = _compat.mosaic_interpret(interpret, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    found = dict(arrays)

    def keep(refs: Mapping[str, Any], index: int, unit: Any, sums: Sequence[jax.Array]) -> None:
        num_parts = plan.products[index].num_parts
        outputs = pl.ds(unit // num_parts * BLOCK + lax.axis_index("wg") * HALF, HALF)
        for i, each in enumerate(sums):
            refs["sums"][lax.rem(unit, num_parts), i, outputs] = each

    def nothing(*_: Any) -> None:
        pass

    surroundings = Surroundings(keep, *[nothing] * 5)
    for index, product in enumerate(plan.products):
        shape = product.num_parts, product.num_sums, product.num_outputs, plan.padded_rows
        result = {"sums": jax.ShapeDtypeStruct(shape, jnp.float32)}
        given = {name: found[name] for name in (input_name(plan, index), f"weight{index}")}
        sums = launch(plan, (index,), given, result, {}, num_ctas, surroundings, params)["sums"]
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
