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
_SPEC = PartitionSpec(TENSOR)


def time_all_reduces(mesh: Mesh, sizes: Sequence[int], width: int, dtype: str) -> Iterator[tuple[str, int, float]]:
    """(implementation, rows, seconds) of sums of [rows, width] for each of these numbers of rows, those by XLA first."""
    for rows in sizes:
        yield XLA, rows, time_all_reduce(mesh, rows, width, dtype)
    taken = [rows for rows in sizes if PeerAllReduces.takes(mesh, rows, width, dtype)]
    if taken and PeerAllReduces.can_run(mesh):
        peer = PeerAllReduces(mesh)
        try:
            for rows in taken:
                yield PEER, rows, peer.time(rows, width, dtype)
        finally:
            peer.close()


def time_all_reduce(mesh: Mesh, rows: int, width: int, dtype: str) -> float:
    """Seconds of one sum of [rows, width] over all devices by XLA, from a sequence of sums."""

    def sums(x_RD: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TIMES, lambda _, x_RD: lax.psum(x_RD, TENSOR), x_RD)

    program, x = _compiled(sums, mesh, rows, width, dtype)
    return median_seconds(program, x, repeats=5) / TIMES


class PeerAllReduces:
    """The same sums through the peers' memory. No other program may run meanwhile.

    Raises ValueError if the devices of the mesh cannot access each other's memory.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._communicator = collectives.Communicator(mesh)

    @staticmethod
    def can_run(mesh: Mesh) -> bool:
        """Whether the devices can access each other's memory."""
        return collectives.peers_can_access(list(mesh.devices.ravel()))

    @staticmethod
    def takes(mesh: Mesh, rows: int, width: int, dtype: str) -> bool:
        """Whether there is a kernel for this shape on this kind of device."""
        return collectives.supports(PEER, "all_reduce", shape=(rows, width), dtype=dtype, num_devices=tensor_size(mesh))

    def time(self, rows: int, width: int, dtype: str) -> float:
        """Seconds of one sum. Raises RuntimeError if a device gave up waiting for the others."""
        workspace = self._communicator.workspace

        def sums(x_RD: jax.Array, workspace: jax.Array) -> jax.Array:
            for _ in range(TIMES):  # not in a loop of XLA, which may copy the workspace
                x_RD = collectives.all_reduce(x_RD, axis=TENSOR, implementation=PEER, workspace=workspace)
            return x_RD

        program, x = _compiled(sums, self.mesh, rows, width, dtype, workspace)
        self._communicator.first_runs(lambda: program(x, workspace))
        seconds = median_seconds(program, x, workspace, repeats=5) / TIMES
        if self._communicator.failed():
            raise RuntimeError("a device gave up waiting for the others")
        return seconds

    def close(self) -> None:
        """Free the memory."""
        self._communicator.close()


def _compiled(
    sums: Callable[..., jax.Array], mesh: Mesh, rows: int, width: int, dtype: str, *others: jax.Array
) -> tuple[Callable[..., Any], jax.Array]:
    """The program, and an array for it. Zeros stay zeros, so that nothing but the sums has to run."""
    x = jax.device_put(jnp.zeros((tensor_size(mesh) * rows, width), dtype), NamedSharding(mesh, _SPEC))
    specs = (_SPEC,) * (1 + len(others))
    program = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=specs, out_specs=_SPEC, check_vma=False))
    options: dict[str, str | bool] = {}
    if mesh.devices.flat[0].platform != "cpu" and jax.__version_info__ >= (0, 11):
        options["xla_gpu_experimental_use_collective_kernels"] = ""  # as the engine has it
    return program.lower(x, *others).compile(options), x
