"""Starts other hosts through Ray, of an engine or with replicas: a placement group with a bundle on each host, an actor in each bundle.

Host 0 is the process that calls `start`; the actor on its host only holds its GPUs. The actors connect to host 0 as hosts started by
hand do, so Ray carries no steps. Their logs come to this process's, as those of all actors do.
"""

import contextlib
import math
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.engine.launch import environment_without_secrets
from jaxllm.errors import ConfigError
from jaxllm.hosts.reception import free_port
from jaxllm.log import logger
from jaxllm.parallel.topology import Topology

_COPIED = ("JAX", "XLA", "NCCL", "GLOO", "HF_", "TF_", "LD_LIBRARY_PATH", "PYTHONPATH", "TOKENIZERS_", "UCX_")
"""Beginnings of the environment variables that actors get."""
_NOT_COPIED = ("HF_TOKEN", env.HOSTS_TOKEN, env.KV_TOKEN)  # an actor's environment can be read in Ray's dashboard
_END_SECONDS = 15.0


class FollowerActor:
    """A host above 0, in a process that Ray started."""

    def gpus(self) -> str | None:
        """The GPUs that Ray gave to this actor, as CUDA_VISIBLE_DEVICES has them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def run(self, work: Callable[[EngineConfig], object], config: bytes) -> None:
        """Be such a host until host 0 ends."""
        from jaxllm import log

        log.set_up()
        work(msgspec.msgpack.decode(config, type=EngineConfig))


class RayHosts:
    """The actors. `config`: for host 0; `work`: what the others do with theirs; `bundle`: the resources of each."""

    def __init__(
        self,
        config: EngineConfig,
        work: Callable[[EngineConfig], object],
        ray: Any,
        group: Any,
        bundle: Mapping[str, float],
        *,
        ends_ray: bool,
    ):
        self.config, self._work, self._bundle = config, work, bundle
        self._ray, self._group, self._ends_ray = ray, group, ends_ray
        self._actors = [_actor(ray, group, rank, bundle) for rank in range(config.parallel.nnodes)]
        self._running: list[Any] = []

    def gpus_of_host_0(self) -> str | None:
        """The GPUs that Ray gave to the actor on this host, as CUDA_VISIBLE_DEVICES has them."""
        return self._ray.get(self._actors[0].gpus.remote())

    def follow(self) -> None:
        """Have the actors connect to host 0, which listens soon."""
        self._running = [self._run(rank) for rank in range(1, len(self._actors))]

    def start_again(self, rank: int) -> None:
        """Start a host that was lost again. Ray does so once its place, or another, is free."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._actors[rank])
        self._actors[rank] = _actor(self._ray, self._group, rank, self._bundle)
        self._running[rank - 1] = self._run(rank)

    def _run(self, rank: int) -> Any:
        options = {"node_rank": rank, "distributed_executor_backend": "mp", "use_progress_bar": False}
        return self._actors[rank].run.remote(self._work, msgspec.msgpack.encode(self.config.replace(**options)))

    def fault(self) -> str | None:
        """Why an actor ended before it connected; None if none did."""
        ended, _ = self._ray.wait(self._running, num_returns=1, timeout=0) if self._running else ([], [])
        for reference in ended:
            try:
                self._ray.get(reference)
            except Exception as error:
                cause = getattr(error, "cause", None) or error
                return f"host {self._running.index(reference) + 1} (an actor of Ray) failed: {type(cause).__name__}: {cause}"
        return None

    def end(self) -> None:
        """End the actors and give their resources back. They have ended by themselves unless they hang."""
        with contextlib.suppress(Exception):
            self._ray.wait(self._running, num_returns=len(self._running), timeout=_END_SECONDS)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(self._group)
        if self._ends_ray:
            with contextlib.suppress(Exception):
                self._ray.shutdown()


def start(config: EngineConfig, work: Callable[[EngineConfig], object]) -> RayHosts | None:
    """Start an actor on each host, which calls `work`, a function of a module; None if this host has enough GPUs by itself.

    Raises ConfigError if Ray is missing, no cluster runs, or it has too few hosts or GPUs that are free.
    """
    ray = _import_ray()
    ends_ray = not ray.is_initialized()
    if ends_ray:
        _connect(ray)
    node_id = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    num_hosts = _num_hosts(config, next(node for node in nodes if node["NodeID"] == node_id))
    if num_hosts == 1:
        logger.info("this host has all %d GPUs that are needed; Ray starts no other", _num_devices(config))
        return None
    if num_hosts > len(nodes):
        raise ConfigError(
            f"{_num_devices(config)} devices on {num_hosts} hosts are asked for, "
            f"the Ray cluster has {len(nodes)}; start Ray on more, or lower --nnodes"
        )
    share = _num_devices(config) // num_hosts
    bundle = {"CPU": 1.0, **({"GPU": float(share)} if any(node["Resources"].get("GPU") for node in nodes) else {})}
    address = ray.util.get_node_ip_address()
    config = config.replace(nnodes=num_hosts, node_rank=0, master_addr=address, master_port=free_port(address))
    group = _place(ray, [bundle] * num_hosts, node_id, config.parallel.distributed_timeout_seconds)
    hosts = RayHosts(config, work, ray, group, bundle, ends_ray=ends_ray)
    if "GPU" in bundle and (gpus := hosts.gpus_of_host_0()):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # JAX has not started yet
    logger.info("Ray gives %d hosts with %s on each; host 0 is %s", num_hosts, _described(bundle), socket.gethostname())
    hosts.follow()
    return hosts


def _import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend is ray, which is not installed ({error}); pip install 'jaxllm[ray]' on all hosts"
        ) from error
    return ray


def _connect(ray: Any) -> None:
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), configure_logging=False)
    except Exception as error:
        raise ConfigError(
            f"no Ray cluster can be reached from here ({str(error).partition(chr(10))[0]}); run `ray start --head` on this host and "
            "`ray start --address=…` on the others, or set RAY_ADDRESS"
        ) from error


def _num_hosts(config: EngineConfig, own: Mapping[str, Any]) -> int:
    """The requested number of hosts, or as many as the engine needs if each has as many GPUs as this one."""
    if config.parallel.nnodes > 1:
        return config.parallel.nnodes
    num_gpus = int(own["Resources"].get("GPU", 0))
    if not num_gpus:
        raise ConfigError("Ray knows of no GPU on this host: give the number of hosts with --nnodes")
    num_hosts = math.ceil(_num_devices(config) / num_gpus)
    config.replace(nnodes=num_hosts)  # raises if they cannot share the devices
    return num_hosts


def _num_devices(config: EngineConfig) -> int:
    """Number of devices of all hosts together."""
    return config.parallel.num_replicas * Topology.of(config.parallel).num_devices


def _place(ray: Any, bundles: list[dict[str, float]], node_id: str, timeout_seconds: int) -> Any:
    """A placement group with one bundle for each host, the first on this one."""
    on_own: list[dict[str, str]] = [{"ray.io/node-id": node_id}, *({} for _ in bundles[1:])]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=on_own)
    if not group.wait(timeout_seconds):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"Ray found no {len(bundles)} hosts with {_described(bundles[0])} free on each, this host among them, within "
            f"{timeout_seconds} s (--distributed-timeout-seconds); `ray status` shows what is in use"
        )
    return group


def _actor(ray: Any, group: Any, rank: int, bundle: Mapping[str, float]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    remote = ray.remote(
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0.0),
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        runtime_env={"env_vars": _environment()},
    )(FollowerActor)
    return remote.remote()


def _environment() -> dict[str, str]:
    kept = environment_without_secrets(os.environ)
    return {name: value for name, value in kept.items() if name.startswith(_COPIED) and not name.startswith(_NOT_COPIED)}


def _described(bundle: Mapping[str, float]) -> str:
    return f"{bundle['GPU']:g} GPUs" if "GPU" in bundle else "a CPU"
