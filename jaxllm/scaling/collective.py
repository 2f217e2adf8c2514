"""The time of an all-reduce over the devices of a tensor-parallel size, as each layer of a model needs two of them per step."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import TENSOR
from jaxllm.scaling.limits import median_seconds

TIMES = 32
"""All-reduces in one program, so that its launch does not count."""


def time_all_reduce(mesh: Mesh, shape: Sequence[int], dtype: str) -> float:
    """Seconds of a sum of one array per device over all of them, by XLA's own means (NCCL on GPUs), one after the other."""

    def sums(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TIMES, lambda _, x: lax.psum(x, TENSOR), x)

    # Zeros stay zeros, so that nothing but the sums has to run.
    x = jax.device_put(jnp.zeros((mesh.size, *shape), dtype), NamedSharding(mesh, PartitionSpec(TENSOR)))
    spec = PartitionSpec(TENSOR)
    program = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    options: dict[str, str | bool] = {}
    if mesh.devices.flat[0].platform != "cpu" and jax.__version_info__ >= (0, 11):
        options["xla_gpu_experimental_use_collective_kernels"] = ""
    return median_seconds(program.lower(x).compile(options), x, repeats=5) / TIMES
