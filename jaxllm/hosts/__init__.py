"""An engine on several hosts: host 0 schedules and sends each call to the others, which run the same programs over one mesh.

`open_hosts` is called on each host. Importing it does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path

    from jaxllm.hosts.follower import Member
    from jaxllm.hosts.leader import Leader


def open_hosts(config: EngineConfig, model_dir: "Path") -> "Leader | Member | None":
    """Wait for all hosts of an engine and start `jax.distributed` with them. Before JAX finds its devices. None if there is one host.

    Raises ConfigError if a host does not come, or differs from the others.
    """
    started = None
    if config.parallel.distributed_executor_backend == "ray" and config.parallel.node_rank == 0:
        from jaxllm.hosts import with_ray
        from jaxllm.hosts.follower import follow

        started = with_ray.start(config, follow)
        config = config if started is None else started.config
    if config.parallel.nnodes == 1:
        return None
    from jaxllm.hosts import process_group
    from jaxllm.hosts.identity import identity

    process_group.check_unused()
    found = identity(config, model_dir)
    if config.parallel.node_rank == 0:
        from jaxllm.hosts.leader import Leader

        try:
            return Leader.of(config, found, started)
        except BaseException:
            if started is not None:
                started.end()
            raise
    from jaxllm.hosts.follower import Member

    return Member.of(config, found)
