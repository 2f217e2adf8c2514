"""Which replicas a host has, and which devices each of them gets: environment variables of its process."""

import os

from jaxllm import gpus
from jaxllm.config import EngineConfig, ParallelOptions
from jaxllm.errors import ConfigError
from jaxllm.options.kv_transfer import LOOPBACK, PORT
from jaxllm.parallel.topology import Topology

VISIBLE = "CUDA_VISIBLE_DEVICES"


def ranks_here(parallel: ParallelOptions) -> range:
    """The replicas that lie on this host: as many as on every other. An engine on several hosts is one, on host 0."""
    if parallel.num_replicas == 1:
        return range(1)
    share = parallel.num_replicas // parallel.nnodes
    return range(parallel.node_rank * share, (parallel.node_rank + 1) * share)


def of_one_host(config: EngineConfig) -> EngineConfig:
    """The options of each engine process, for which the replicas of its host are all: each lies whole there."""
    if config.parallel.num_replicas == 1:
        return config
    here, listens = len(ranks_here(config.parallel)), {}
    if config.parallel.nnodes > 1:
        listens = {"kv_host": LOOPBACK, "kv_port": PORT}  # which only engines with a role do, which they get later
    return config.replace(data_parallel_size=here, nnodes=1, node_rank=0, distributed_executor_backend=None, **listens)


def environments(parallel: ParallelOptions, given: str = "") -> list[dict[str, str]]:
    """Environment variables by which each process of a replica on this host sees its devices alone: on GPUs the next ones of those that
    this process may use; on a CPU nothing. given: what says how many replicas there are, for errors; empty: data_parallel_size. Raises
    ConfigError if there are too few."""
    num_replicas, num_each = len(ranks_here(parallel)), Topology.of(parallel).num_devices
    if num_replicas == 1 or os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return [{}] * num_replicas
    names = _visible_gpus()
    if not names:
        return [{}] * num_replicas
    if len(names) < num_replicas * num_each:
        given = given or f"data_parallel_size {num_replicas}{' on each host' if parallel.nnodes > 1 else ''}"
        raise ConfigError(
            f"{given} with {num_each} GPU{'s' * (num_each > 1)} each needs {num_replicas * num_each} GPUs, this machine has "
            f"{len(names)}{_hint(len(names))}; choose at most {len(names) // num_each or 'fewer devices for each'}"
        )
    return [{VISIBLE: ",".join(names[rank * num_each : (rank + 1) * num_each])} for rank in range(num_replicas)]


def _visible_gpus() -> list[str]:
    """The names, as CUDA_VISIBLE_DEVICES has them, of the GPUs that this process may use."""
    given = os.environ.get(VISIBLE)
    found = gpus.count()
    if given is None:
        return [str(index) for index in range(found)]
    return [name.strip() for name in given.split(",") if name.strip()][:found]


def _hint(num_visible: int) -> str:
    hidden = gpus.hidden_gpus(num_visible)
    return f" ({hidden})" if hidden else ""
