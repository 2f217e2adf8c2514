"""Collectives between the GPUs of one host that one process drives: one signature each, several implementations.

All are called inside a `shard_map` over a mesh with one axis, `axis`, of n devices, and see what their device holds. `workspace` is
this device's part of `Communicator.workspace`, sharded over the axis ([1, words]); None will do for "xla".

"peer" (kernels that write into each other's memory) asks of its callers, because XLA does not know what its kernels share:
- Each collective needs, by data, a result of the one before it in the program. Two that do not could run at once.
- The workspace is passed to the program as it is, never donated, and not into a loop (`scan`, `while`), which may copy it.
- The first runs of every program are silent (`Communicator.first_runs`).
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

import jax
from jax.typing import DTypeLike

from pallas_kernels.collectives.exchange import WORKSPACE_BYTES
from pallas_kernels.collectives.workspace import Communicator, peers_can_access

__all__ = [
    "IMPLEMENTATIONS",
    "OPS",
    "WORKSPACE_BYTES",
    "Communicator",
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "all_to_all",
    "choose",
    "peers_can_access",
    "status",
    "supports",
]

IMPLEMENTATIONS = {
    "xla": "pallas_kernels.collectives.xla",
    "peer": "pallas_kernels.collectives.peer",
}
"""Each module has the functions of OPS, status, and supports(op, platform, shape, dtype, num_devices)."""

OPS = ("all_reduce", "all_reduce_norm", "all_gather", "all_to_all")

MAX_PEER_BYTES = {"all_reduce": 4 << 20, "all_reduce_norm": 4 << 20, "all_gather": 1 << 16, "all_to_all": 16 << 20}
"""Of the argument on one device: with more, NCCL is expected to be faster. `choose` goes by it."""


def all_reduce(x_TD: jax.Array, *, axis: str, implementation: str, workspace: jax.Array | None = None) -> jax.Array:
    """The sum over devices, in the type of x: bfloat16 or float32.

    By "peer" in rank order, in float32, rounded once, so that every device has the same bits; a NaN may change its payload.
    """
    module = _resolve("all_reduce", implementation, x_TD, axis, workspace)
    return module.all_reduce(x_TD, axis=axis, workspace=workspace)


def all_reduce_norm(
    part_TD: jax.Array,
    residual_TD: jax.Array | None,
    weight_D: jax.Array,
    eps: float,
    *,
    axis: str,
    implementation: str,
    workspace: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(h, y): h = sum of parts + residual, added in float32 and rounded once to the type of part; y = h / rms(h) * weight.

    The norm is computed in float32 from the rounded h. residual, the same on all devices, and weight have the type of part.
    """
    for other in (weight_D, *([residual_TD] if residual_TD is not None else [])):
        if other.dtype != part_TD.dtype:
            raise ValueError(f"all_reduce_norm of {part_TD.dtype} with a residual or weight of {other.dtype}; convert it")
    module = _resolve("all_reduce_norm", implementation, part_TD, axis, workspace)
    return module.all_reduce_norm(part_TD, residual_TD, weight_D, eps, axis=axis, workspace=workspace)


def all_gather(x_RK: jax.Array, *, axis: str, implementation: str, workspace: jax.Array | None = None) -> jax.Array:
    """[n, ...]: what each device has, any bits. By "peer" for small arrays of 32-bit numbers."""
    module = _resolve("all_gather", implementation, x_RK, axis, workspace)
    return module.all_gather(x_RK, axis=axis, workspace=workspace)


def all_to_all(x_nM: jax.Array, *, axis: str, implementation: str, workspace: jax.Array | None = None) -> jax.Array:
    """[n, ...] to [n, ...]: slice d goes to device d, slice s came from device s. By "peer" a NaN may change its payload."""
    if x_nM.shape[0] != (num_devices := jax.lax.axis_size(axis)):
        raise ValueError(f"all_to_all of {x_nM.shape[0]} slices over {num_devices} devices; give one for each device")
    module = _resolve("all_to_all", implementation, x_nM, axis, workspace)
    return module.all_to_all(x_nM, axis=axis, workspace=workspace)


def status(after: jax.Array, *, axis: str, implementation: str, workspace: jax.Array | None = None) -> jax.Array:
    """int32[1]: what went wrong on this device until `after` was computed: 0 nothing, 1 a wait was given up, 2 collectives are silent.

    After a 1, what collectives returned is wrong on some device, and nothing is exchanged until `Communicator.reset`.
    """
    module = _module(implementation, workspace)
    return module.status(after, axis=axis, workspace=workspace)


def supports(implementation: str, op: str, *, shape: Sequence[int], dtype: DTypeLike, num_devices: int) -> bool:
    """Whether an implementation takes a case, on the platform it is made for. shape: of the first argument, on one device."""
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.supports(op, platform="gpu", shape=shape, dtype=dtype, num_devices=num_devices)


def choose(op: str, *, shape: Sequence[int], dtype: DTypeLike, num_devices: int) -> str:
    """The faster implementation for a case where peers can access each other: "peer" up to MAX_PEER_BYTES if it takes it."""
    num_bytes = jax.numpy.dtype(dtype).itemsize
    for size in shape:
        num_bytes *= size
    is_taken = supports("peer", op, shape=shape, dtype=dtype, num_devices=num_devices)
    return "peer" if is_taken and num_bytes <= MAX_PEER_BYTES[op] else "xla"


def _module(implementation: str, workspace: jax.Array | None) -> ModuleType:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of collectives; there are {', '.join(IMPLEMENTATIONS)}")
    if implementation != "xla" and workspace is None:
        raise ValueError(f"collectives by {implementation!r} need a workspace; pass that of a Communicator")
    return importlib.import_module(IMPLEMENTATIONS[implementation])


def _resolve(op: str, implementation: str, x: jax.Array, axis: str, workspace: jax.Array | None) -> ModuleType:
    module = _module(implementation, workspace)
    num_devices = jax.lax.axis_size(axis)
    # An explicit choice is not held to the platform: a program may be compiled here for GPUs elsewhere.
    if not supports(implementation, op, shape=x.shape, dtype=x.dtype, num_devices=num_devices):
        raise ValueError(
            f"{op} by {implementation!r} does not take {list(x.shape)} of {x.dtype} on each of {num_devices} devices; use 'xla'"
        )
    return module
