"""Times an all-reduce over the devices of a tensor-parallel size; each layer of a model needs two of them per step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import TENSOR, tensor_size
from jaxllm.scaling.limits import median_seconds
from pallas_kernels import collectives

TIMES = 32
"""Number of all-reduces in one program, to make its launch negligible."""
XLA, PEER = "xla", "peer"
""""xla": XLA (NCCL on GPUs); "peer": kernels that write into each other's memory (`pallas_kernels.collectives`)."""


def time_all_reduces(mesh: Mesh, sizes: Sequence[int], width: int, dtype: str) -> Iterator[tuple[str, int, float]]:
    """(implementation, rows, seconds) of sums of [rows, width] for each of these numbers of rows, those by XLA first.

    Those by PEER follow for the shapes that have a kernel, if the devices can access each other's memory. No other program may run
    meanwhile. Raises RuntimeError if a device gave up waiting for the others.
    """
    for rows in sizes:
        yield XLA, rows, time_all_reduce(mesh, rows, width, dtype)
    n = tensor_size(mesh)
    taken = [
        rows for rows in sizes if collectives.supports(PEER, "all_reduce", shape=(rows, width), dtype=dtype, num_devices=n)
    ]
    if taken and collectives.peers_can_access(list(mesh.devices.ravel())):
        communicator = collectives.Communicator(mesh)
        try:
            for rows in taken:
                yield PEER, rows, _time_by_peers(communicator, mesh, rows, width, dtype)
        finally:
            communicator.close()


def time_all_reduce(mesh: Mesh, rows: int, width: int, dtype: str) -> float:
    """Seconds of one sum of [rows, width] over all devices by XLA, from a sequence of sums."""

    def sums(x_RD: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TIMES, lambda _, x_RD: lax.psum(x_RD, TENSOR), x_RD)

    program, x = _compiled(sums, mesh, rows, width, dtype)
    return median_seconds(program, x, repeats=5) / TIMES


def _time_by_peers(communicator: collectives.Communicator, mesh: Mesh, rows: int, width: int, dtype: str) -> float:
    workspace = communicator.workspace

    def sums(x_RD: jax.Array, workspace: jax.Array) -> jax.Array:
        for _ in range(TIMES):  # not in a loop of XLA, which may copy the workspace
            x_RD = collectives.all_reduce(x_RD, axis=TENSOR, implementation=PEER, workspace=workspace)
        return x_RD

    program, x = _compiled(sums, mesh, rows, width, dtype, workspace)
    communicator.first_runs(lambda: program(x, workspace))
    seconds = median_seconds(program, x, workspace, repeats=5) / TIMES
    if communicator.failed():
        raise RuntimeError("a device gave up waiting for the others")
    return seconds


def _compiled(
    sums: Callable[..., jax.Array], mesh: Mesh, rows: int, width: int, dtype: str, *others: jax.Array
) -> tuple[Callable[..., Any], jax.Array]:
    """The program, and an array for it. Zeros stay zeros, so that nothing but the sums has to run."""
    spec = PartitionSpec(TENSOR)
    x = jax.device_put(jnp.zeros((tensor_size(mesh) * rows, width), dtype), NamedSharding(mesh, spec))
    program = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=(spec,) * (1 + len(others)), out_specs=spec, check_vma=False))
    options: dict[str, str | bool] = {}
    if mesh.devices.flat[0].platform != "cpu" and jax.__version_info__ >= (0, 11):
        options["xla_gpu_experimental_use_collective_kernels"] = ""  # as the engine has it
    return program.lower(x, *others).compile(options), x
