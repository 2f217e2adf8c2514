"""Collectives over peer memory: kernels of Mosaic GPU whose body is PTX (`bodies`), which to XLA are ordinary custom calls.

XLA gives them no barrier before, no clique, no addresses, and captures them in CUDA graphs. It does not know either that they
depend on each other through the workspace, nor that they write to it: each must need a result of the one before, and what reads
the workspace must need a result of what wrote to it (`status`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.collectives import programs
from pallas_kernels.collectives.programs import Program


def supports(op: str, *, platform: str, shape: Sequence[int], dtype: DTypeLike, num_devices: int) -> bool:
    if platform != "gpu" or not _compat.has_mosaic():
        return False
    name, sizes = jnp.dtype(dtype).name, tuple(shape)
    if op in ("all_reduce", "all_reduce_norm"):
        eps = 1e-6 if op == "all_reduce_norm" else None
        return programs.all_reduce(sizes, name, num_devices, eps=eps) is not None
    return getattr(programs, op)(sizes, name, num_devices) is not None


def all_reduce(x_TD: jax.Array, *, axis: str, workspace: jax.Array, num_shots: int | None = None) -> jax.Array:
    program = programs.all_reduce(x_TD.shape, x_TD.dtype.name, jax.lax.axis_size(axis), num_shots=num_shots)
    return run(program, {"workspace": workspace, "x": x_TD})[0]


def all_reduce_norm(
    part_TD: jax.Array,
    residual_TD: jax.Array | None,
    weight_D: jax.Array,
    eps: float,
    *,
    axis: str,
    workspace: jax.Array,
    num_shots: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    has_residual = residual_TD is not None
    options: dict[str, Any] = {"has_residual": has_residual, "eps": eps, "num_shots": num_shots}
    program = programs.all_reduce(part_TD.shape, part_TD.dtype.name, jax.lax.axis_size(axis), **options)
    arrays = {"workspace": workspace, "x": part_TD, "weight": weight_D}
    out, normed = run(program, arrays | ({"residual": residual_TD} if residual_TD is not None else {}))
    return out, normed


def all_gather(x_RK: jax.Array, *, axis: str, workspace: jax.Array) -> jax.Array:
    program = programs.all_gather(x_RK.shape, x_RK.dtype.name, jax.lax.axis_size(axis))
    return run(program, {"workspace": workspace, "x": x_RK})[0]


def all_to_all(x_nM: jax.Array, *, axis: str, workspace: jax.Array) -> jax.Array:
    program = programs.all_to_all(x_nM.shape, x_nM.dtype.name, jax.lax.axis_size(axis))
    return run(program, {"workspace": workspace, "x": x_nM})[0]


def status(after: jax.Array, *, axis: str, workspace: jax.Array) -> jax.Array:
    return run(programs.status(), {"workspace": workspace, "after": after})[0]


def run(program: Program | None, arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
    """The results of a program of these arrays, in its order."""
    assert program is not None, "a case that `supports` refuses"
    plgpu = _compat.mosaic()
    inputs = [arrays[name] for name in program.operands if name in arrays]
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in program.results.values()]
    assert program.operands[len(inputs) :] == (*program.results, *["scratch"] * bool(program.scratch_words))

    def kernel(*refs: Any) -> None:
        _inline(program.text, refs)

    kernel.__name__ = program.name
    options: dict[str, Any] = {"grid": (program.ctas,), "grid_names": ("cta",)}
    if program.threads > 128:
        options |= {"num_threads": program.threads // 128, "thread_name": "warpgroup"}
    if program.scratch_words:
        options["scratch_types"] = [plgpu.SMEM((program.scratch_words,), jnp.float32)]
    return plgpu.kernel(
        kernel,
        out_type=results,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            skip_device_barrier=True,  # no kernel waits for another's start
        ),
        **options,
    )(*inputs)


def _inline(text: str, refs: Sequence[Any]) -> None:
    """A kernel's body: a block of PTX whose operands are pointers to these references."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    plgpu = _compat.mosaic()

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
    def body(_: Any, *references: Any) -> None:
        pointers = [utils.memref_ptr(reference) for reference in references]
        spaces = [llvm.PointerType(pointer.type).address_space for pointer in pointers]
        kinds = ",".join("l" if space in (0, 1) else "r" for space in spaces)  # 64 bits; shared memory has 32
        options: dict[str, Any] = {"has_side_effects": True, "convergent": True}  # barriers stay where they are
        llvm.inline_asm(ir.Type.parse("!llvm.void"), pointers, text, kinds, **options)

    body(*refs)
