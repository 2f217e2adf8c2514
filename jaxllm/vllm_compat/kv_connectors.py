"""vLLM's --kv-transfer-config: which connectors are taken, what their keys set here, and which are refused. Does not import JAX."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jaxllm.errors import ConfigError
from jaxllm.log import info_once
from jaxllm.options.host_tier import NO_EFFECT, OWN_STORE, HostTierOptions

NAME = "kv_transfer_config"
SIZE = "kv_offloading_size"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
DEFAULT_SIMPLE_BYTES = 8 << 30
"""Host memory of vLLM's SimpleCPUOffloadConnector without cpu_bytes_to_use."""


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """The keys of the JSON object, with vLLM's names. Make it with `of`, which checks it."""

    kv_connector: str | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    """Whether the connector writes contents, reads them, or both."""
    engine_id: str | None = None
    kv_buffer_device: str | None = None
    kv_port: int | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    """Module of a user-defined connector; kv_connector is the name of its class."""
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "recompute"

    @classmethod
    def of(cls, raw: Mapping[str, Any] | None) -> "KVTransferConfig":
        """From the JSON object. Raises ConfigError with the first thing that is wrong."""
        given, known = dict(raw or {}), {each.name: each for each in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"{NAME} has {name!r}, which is unknown; it takes {', '.join(known)}")
            if value is not None and not isinstance(value, _TYPES[name]):
                raise ConfigError(f"{NAME}.{name} is of type {type(value).__name__}, must be {_TYPES[name].__name__}")
        config = cls(**{name: value for name, value in given.items() if value is not None})
        if given:
            config._check()
        return config

    def _check(self) -> None:
        if not self.kv_connector:
            raise ConfigError(f"{NAME} has no kv_connector; name one ({', '.join(_TAKEN)}), or leave all of it out")
        if self.kv_role is None or self.kv_role not in ROLES:
            given = "missing" if self.kv_role is None else repr(self.kv_role)
            raise ConfigError(f"{NAME}.kv_role is {given}, must be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        if isinstance(self.kv_port, bool) or not 0 <= (self.kv_port or 0) <= 65535:
            raise ConfigError(f"{NAME}.kv_port is {self.kv_port!r}, must be 0 to 65535")
        if self.kv_buffer_device not in (None, "cuda", "cpu"):
            raise ConfigError(f"{NAME}.kv_buffer_device is {self.kv_buffer_device!r}, must be cuda or cpu; or leave it out")
        if self.enable_permute_local_kv:
            raise ConfigError(f"{NAME}.enable_permute_local_kv is set, but all engines here have one layout; leave it out")
        policies = ("recompute", "fail") if self.is_of_roles and self.kv_role != "kv_producer" else ("recompute",)
        if self.kv_load_failure_policy not in policies:
            raise ConfigError(
                f"{NAME}.kv_load_failure_policy is {self.kv_load_failure_policy!r}, but this connector takes {' or '.join(policies)} "
                "alone; give that, or leave it out"
            )
        if self.kv_connector_module_path is not None:
            for name in ("kv_connector_module_path", "kv_connector"):
                if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", getattr(self, name)):
                    raise ConfigError(
                        f"{NAME}.{name} is {getattr(self, name)!r}, must be the name of a module, and of a class in it"
                    )
        self.options()
        self.host_tier()

    @property
    def is_own(self) -> bool:
        """Whether the connector is a class from outside this package."""
        return self.kv_connector_module_path is not None

    @property
    def is_of_roles(self) -> bool:
        """Whether blocks are passed between prefill and decode engines."""
        return not self.is_own and CONNECTORS.get(self.kv_connector or "") is _roles

    def options(self, num_replicas: int = 1) -> dict[str, Any]:
        """The options of ours that the connector sets. Its size is that of one engine, kv_offloading_size that of all on a host. Raises
        ConfigError for a connector that is refused."""
        if self.kv_connector is None or self.is_own:
            return {}
        connector = CONNECTORS.get(self.kv_connector)
        if connector is None:
            raise ConfigError(
                f"{NAME}.kv_connector is {self.kv_connector!r}, which is unknown; name one of {', '.join(_TAKEN)}, or with "
                "kv_connector_module_path a class of your own (docs/KV_OFFLOADING.md)"
            )
        if isinstance(connector, str):
            raise ConfigError(f"{NAME}.kv_connector {self.kv_connector} is refused: {connector}")
        found = connector(self)
        return found if (size := found.get(SIZE)) is None else {**found, SIZE: num_replicas * size}

    def host_tier(self) -> "HostTierOptions":
        """The options of the host tier in kv_connector_extra_config."""
        if self.is_own or CONNECTORS.get(self.kv_connector or "") is not _offloading:
            return HostTierOptions()
        return HostTierOptions.of(self.kv_connector_extra_config)


_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("kv_connector", "kv_role", "engine_id", "kv_buffer_device", "kv_connector_module_path"), str),
    "kv_port": int,
    "kv_connector_extra_config": dict,
    "enable_permute_local_kv": bool,
    "kv_load_failure_policy": str,
}


def _offloading(config: KVTransferConfig) -> dict[str, Any]:
    """Set the size of the host tier, and when it is written."""
    if config.kv_role != "kv_both":
        raise ConfigError(f"{NAME}.kv_role is {config.kv_role}, but host memory is written and read; give kv_both")
    tier = config.host_tier()
    size = tier.cpu_bytes_to_use
    if size is None:
        if config.kv_connector != "SimpleCPUOffloadConnector":
            raise ConfigError(
                "kv_connector_extra_config.cpu_bytes_to_use is missing; give the bytes of host memory for all devices of an engine"
            )
        size = DEFAULT_SIMPLE_BYTES
    write = {} if tier.lazy_offload is None else {"kv_offloading_write": "cold" if tier.lazy_offload else "full"}
    return {SIZE: size / 2**30, **write}


_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def _roles(config: KVTransferConfig) -> dict[str, Any]:
    """Set the role of a prefill or decode engine, its port, and the policy of a decode engine."""
    if config.kv_connector_extra_config:
        raise ConfigError(
            f"{NAME}.kv_connector_extra_config is set, but {config.kv_connector} takes no keys here; leave it out"
        )
    found: dict[str, Any] = {"kv_role": _ROLES[config.kv_role or ""]}
    if config.kv_port is not None and config.kv_role != "kv_consumer":
        found["kv_port"] = config.kv_port
    if config.kv_load_failure_policy != "recompute":
        found["kv_load_failure_policy"] = config.kv_load_failure_policy
    return found


Connector = str | Callable[[KVTransferConfig], dict[str, Any]]
_OTHERS = "engines pass blocks to engines of jaxllm; NixlConnector and JaxLLMConnector do that here (docs/PREFILL_DECODE.md)"
CONNECTORS: Mapping[str, Connector] = {
    "OffloadingConnector": _offloading,
    "SimpleCPUOffloadConnector": _offloading,
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", "JaxLLMConnector"), _roles),
    **dict.fromkeys(("NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"), _OTHERS),
    **dict.fromkeys(
        ("LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector", "FlexKVConnectorV1", "HF3FSKVConnector"),
        OWN_STORE,
    ),
    "HiSparseConnector": "no model here attends to chosen blocks in host memory; OffloadingConnector keeps blocks there",
    "MultiConnector": "an engine has host memory and one connector behind it; name that one",
    **dict.fromkeys(
        ("ExampleConnector", "ExampleHiddenStatesConnector", "DecodeBenchConnector"),
        "it shows vLLM's interface; docs/KV_OFFLOADING.md has an example of this one",
    ),
}
"""vLLM's connectors, and ours: what sets the options of ours, or why it is refused and what to do instead."""
_TAKEN = [name for name, connector in CONNECTORS.items() if not isinstance(connector, str)]


def as_object(raw: Any) -> Any:
    """The JSON object of a text, or of a `KVTransferConfig`; all else as it is."""
    if isinstance(raw, KVTransferConfig):
        return {each.name: value for each in fields(raw) if (value := getattr(raw, each.name)) not in (None, {})}
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


def with_connector_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those that kv_transfer_config sets. What is wrong with it is reported by `kv_connector_faults`."""
    if options.get(NAME) is None:
        return dict(options)
    raw = as_object(options[NAME])
    try:
        found = KVTransferConfig.of(raw).options(_num_replicas(options)) if isinstance(raw, dict) else {}
    except ConfigError:
        found = {}
    return {**options, NAME: raw, **{name: value for name, value in found.items() if options.get(name) is None}}


def without_connector_size(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat options without the size that kv_transfer_config sets: the number of replicas may change."""
    sets_size = config[NAME] is not None and SIZE in KVTransferConfig.of(config[NAME]).options()
    return {**config, SIZE: None} if sets_size else dict(config)


def _num_replicas(options: Mapping[str, Any]) -> int:
    """Engines that share kv_offloading_size, those of a host. A wrong number is reported elsewhere."""
    number, num_hosts = options.get("data_parallel_size"), options.get("nnodes", 1)
    if type(number) is not int or type(num_hosts) is not int or num_hosts < 1:
        return 1
    return max(1, number // num_hosts)


def kv_connector_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with kv_transfer_config, and what contradicts it."""
    raw = flat[NAME]
    if not isinstance(raw, dict):
        return []
    try:
        config = KVTransferConfig.of(raw)
    except ConfigError as error:
        return [str(error)]
    faults = [
        f"{NAME} sets {name} to {_shown(value)}, but {name} is {_shown(flat[name])}; leave one of both out"
        for name, value in config.options(_num_replicas(flat)).items()
        if isinstance(flat[name], int | float | str) and flat[name] != value
    ]
    if config.is_own and not flat["kv_offloading_size"]:
        faults.append(
            f"{NAME}.kv_connector {config.kv_connector} reads and writes host memory, but kv_offloading_size is not set; set it too"
        )
    return faults


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def tell_unused_connector_keys(raw: Mapping[str, Any] | None) -> None:
    """Log the keys that change nothing."""
    config = KVTransferConfig.of(raw)
    if config.is_own:
        return  # it gets them all
    if config.is_of_roles:
        info_once(
            f"{NAME}.kv_connector {config.kv_connector}: blocks are passed between engines of jaxllm, not to or from vLLM's"
        )
    for name in ("engine_id", "kv_buffer_device", "kv_port"):
        if getattr(config, name) is not None and name not in config.options():
            info_once(f"{NAME}.{name} changes nothing here")
    for name in NO_EFFECT.keys() & config.kv_connector_extra_config.keys():
        info_once(f"kv_connector_extra_config.{name} changes nothing here: {NO_EFFECT[name]}")
