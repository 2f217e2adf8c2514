"""The options of events about the prefix cache. The names and defaults are vLLM's. Does not import JAX."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.errors import ConfigError

PUBLISHERS = ("zmq", "null")
_SCHEMES = ("tcp://", "ipc://", "inproc://")
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Whether and where events are published. Make it with `of`, which checks it."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """One of `PUBLISHERS`; None: zmq."""
    endpoint: str = "tcp://*:5557"
    """Where events go: an address to listen at, if it has an asterisk or `::` or is of ipc or inproc, else one to connect to."""
    replay_endpoint: str | None = None
    """Where to listen for requests to send events again; None: nowhere."""
    buffer_steps: int = 10_000
    """So many messages can be sent again."""
    hwm: int = 100_000
    """Most messages that wait for a subscriber; further ones are not sent to it. 0: without limit."""
    max_queue_size: int = 100_000
    """Most messages that wait to be sent at all."""
    topic: str = ""
    """The first frame of each message."""

    @classmethod
    def of(cls, raw: Mapping[str, Any] | None) -> "KVEventsConfig":
        """From the JSON object. Raises ConfigError with the first thing that is wrong."""
        given, known = dict(raw or {}), {field.name: field for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"kv_events_config has {name!r}, which is unknown; it takes {', '.join(known)}")
            default = known[name].default
            of_type = str if default is None else type(default)
            if type(value) is not of_type and not (value is None and default is None):
                raise ConfigError(f"kv_events_config.{name} is {value!r}, must be {of_type.__name__}")
        config = cls(**given)
        if config.publisher not in (None, *PUBLISHERS):
            raise ConfigError(f"kv_events_config.publisher is {config.publisher!r}, must be one of {', '.join(PUBLISHERS)}")
        for name, least in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
            if not least <= getattr(config, name) < 2**31:
                raise ConfigError(f"kv_events_config.{name} is {getattr(config, name)}, must be {least} to {2**31 - 1}")
        for name, endpoint in config.endpoints.items():
            if (reason := _endpoint_fault(endpoint)) is not None:
                raise ConfigError(f"kv_events_config.{name} is {endpoint!r}, {reason}")
        return config

    @property
    def publishes(self) -> bool:
        """Whether events are sent to anyone."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def endpoints(self) -> dict[str, str]:
        """The endpoints by the name of their key."""
        replay = {} if self.replay_endpoint is None else {"replay_endpoint": self.replay_endpoint}
        return {"endpoint": self.endpoint, **replay}


def listens_at(endpoint: str) -> bool:
    """Whether a publisher listens at an address, as vLLM's does: at all but those of one host."""
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: the port plus the rank, unless the system chooses one; of inproc the name with it."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if _port_of(endpoint) else endpoint


def kv_events_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with kv_events_config, by itself or with other options."""
    raw, size = flat["kv_events_config"], flat["data_parallel_size"]
    if not isinstance(raw, dict) or not isinstance(size, int):
        return []  # reported already, if it is not None
    try:
        config = KVEventsConfig.of(raw)
    except ConfigError as error:
        return [str(error)]
    if not config.publishes:
        return []
    faults = []
    if flat["enable_prefix_caching"] is False:
        faults.append("kv_events_config is on, but events say what prefix caching keeps, which is off; leave one of both out")
    for name, endpoint in config.endpoints.items():
        given = f"kv_events_config.{name} is {endpoint!r} and data_parallel_size {size}"
        if size > 1 and endpoint.startswith("ipc://"):
            faults.append(f"{given}, but each rank needs an address of its own, which adds its number to a port; use tcp://")
        if _port_of(endpoint) + size - 1 > _MAX_PORT:
            faults.append(f"{given}, but each rank adds its number to the port, at most {_MAX_PORT}; choose a lower one")
    ports = [port for endpoint in config.endpoints.values() if (port := _port_of(endpoint)) and listens_at(config.endpoint)]
    if len(ports) == 2 and abs(ports[0] - ports[1]) < size:
        ranks = f", because each of {size} ranks adds its number" if size > 1 else ""
        faults.append(
            f"kv_events_config.endpoint and replay_endpoint have the ports {ports[0]} and {ports[1]}, must be at least {size} apart{ranks}"
        )
    return faults


def _port_of(endpoint: str) -> int:
    """The port of a tcp address; 0 if the system chooses one, and for other addresses."""
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port != "*" else 0


def _endpoint_fault(endpoint: str) -> str | None:
    """Why an endpoint is wrong."""
    if not endpoint.startswith(_SCHEMES) or endpoint in _SCHEMES:
        return "must begin with tcp://, ipc:// or inproc:// and go on with an address, such as tcp://*:5557"
    is_whole = re.fullmatch(r"tcp://.+:(\d{1,5}|\*)|(ipc|inproc)://.+", endpoint, re.ASCII) is not None
    if is_whole and _port_of(endpoint) <= _MAX_PORT:
        return None
    return f"must have an address and a port of at most {_MAX_PORT}, such as tcp://*:5557"
