"""Times an all-reduce over the devices of a tensor-parallel size; each layer of a model needs two of them per step."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.measuring.limits import median_seconds
from jaxllm.parallel.mesh import TENSOR, tensor_size
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
                yield PEER, rows, time_all_reduce(mesh, rows, width, dtype, communicator)
        finally:
            communicator.close()


def time_all_reduce(
    mesh: Mesh, rows: int, width: int, dtype: str, communicator: collectives.Communicator | None = None
) -> float:
    """Seconds of one sum of [rows, width] over all devices, from a sequence of sums: by PEER with a communicator, else by XLA."""

    def sums(x_RD: jax.Array, *workspace: jax.Array) -> jax.Array:
        if not workspace:
            return lax.fori_loop(0, TIMES, lambda _, x_RD: lax.psum(x_RD, TENSOR), x_RD)
        for _ in range(TIMES):  # not in a loop of XLA, which may copy the workspace
            x_RD = collectives.all_reduce(x_RD, axis=TENSOR, implementation=PEER, workspace=workspace[0])
        return x_RD

    spec = PartitionSpec(TENSOR)
    # Zeros stay zeros, so that nothing but the sums has to run.
    x = jax.device_put(jnp.zeros((tensor_size(mesh) * rows, width), dtype), NamedSharding(mesh, spec))
    arrays = [x] if communicator is None else [x, communicator.workspace]
    program = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False))
    options: dict[str, str | bool] = {}
    if mesh.devices.flat[0].platform != "cpu" and jax.__version_info__ >= (0, 11):
        options["xla_gpu_experimental_use_collective_kernels"] = ""  # as the engine has it
    run = program.lower(*arrays).compile(options)
    if communicator is not None:
        communicator.first_runs(lambda: run(*arrays))
    seconds = median_seconds(run, *arrays, repeats=5) / TIMES
    if communicator is not None and communicator.failed():
        raise RuntimeError("a device gave up waiting for the others")
    return seconds
