"""Starts the other hosts of a server with replicas through Ray."""

from functools import partial
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.replicas.hosts.host import serve_replicas

if TYPE_CHECKING:
    from jaxllm.hosts.with_ray import RayHosts


def start_others(config: EngineConfig, **more: Any) -> "RayHosts | None":
    """Start them if the options ask for Ray and this host cannot have all replicas; `more`: see `serve_replicas`. Raises ConfigError."""
    if config.parallel.num_replicas == 1 or config.parallel.distributed_executor_backend != "ray":
        return None
    from jaxllm.hosts import with_ray

    return with_ray.start(config, partial(serve_replicas, **more))
