"""The keys of vLLM's offloading connectors that say how blocks are kept in host memory. Does not import JAX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.errors import ConfigError

_DISK = "--kv-offloading-disk keeps contents in files"
OWN_STORE = "name a class of your own with kv_connector_module_path (docs/KV_OFFLOADING.md) in place of a connector of vLLM"


@dataclass(frozen=True, kw_only=True)
class HostTierOptions:
    """Keys of vLLM's offloading connectors in kv_connector_extra_config."""

    cpu_bytes_to_use: int | None = None
    """Host memory for contents, over all devices of an engine."""
    eviction_policy: str = "slru"
    store_threshold: int = 0
    """Contents are stored only if so many requests had them; below 2: all are."""
    max_tracker_size: int = 64_000
    """Contents that are counted for it."""
    offload_prompt_only: bool = False
    """Whether to store only contents that stand in a prompt."""
    lazy_offload: bool | None = None
    """Whether contents are stored shortly before the devices evict them, rather than as soon as they are computed; None: as
    kv_offloading_write says."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "HostTierOptions":
        """From the extra config. Raises ConfigError with the first thing that is wrong."""
        known = {each.name: each.default for each in fields(cls)}
        given: dict[str, Any] = {}
        for name, value in raw.items():
            how = f"kv_connector_extra_config.{name} is {value!r}"
            if value is None or name in NO_EFFECT:
                continue
            if name in _ONLY:
                harmless, way_out = _ONLY[name]
                if not any(value == each and type(value) is type(each) for each in harmless):
                    raise ConfigError(f"{how}: {way_out}; leave it out")
            elif name not in known:
                taken = ", ".join((*known, *NO_EFFECT))
                raise ConfigError(f"kv_connector_extra_config has {name!r}, which is unknown; it takes {taken}")
            else:
                given[name] = value if isinstance(value, bool) else _whole(value)
                if (holds := _RANGES[name])[0](given[name]) is not True:
                    raise ConfigError(f"{how}, must be {holds[1]}")
        return cls(**given)


def _whole(value: Any) -> Any:
    """As an int if it is a whole number, such as 4e9."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_int(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value


_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "cpu_bytes_to_use": (lambda value: type(value) is int and 1 <= value < 10**15, "a number of bytes, at least 1"),
    "eviction_policy": (
        lambda value: isinstance(value, str) and value in ("lru", "slru"),
        "lru or slru; in place of arc take slru, the segmented LRU",
    ),
    "store_threshold": (_is_int(0), "a whole number, at least 0"),
    "max_tracker_size": (_is_int(1), "a whole number, at least 1"),
    **dict.fromkeys(("offload_prompt_only", "lazy_offload"), (lambda value: isinstance(value, bool), "true or false")),
}
_BLOCKS = "what is kept is a block of --block-size tokens"
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "blocks_per_chunk": ((1,), _BLOCKS),
    "block_size": ((), _BLOCKS),
    "cache_policy_module_path": ((), "only lru and slru are offered"),
    "spec_name": (("CPUOffloadingSpec",), f"{_DISK}; for others {OWN_STORE}"),
    "spec_module_path": ((), OWN_STORE),
    "secondary_tiers": (([],), f"{_DISK}; for others {OWN_STORE}"),
    "sync_load_budget_bytes": ((0,), "loads never hold a step up"),
    "self_describing_kv_events": ((False,), "stores in host memory do not carry tokens in events"),
    "kv_offload_backend": (("cpu",), _DISK),
    "cpu_bytes_to_use_per_rank": ((), "give cpu_bytes_to_use, over all ranks"),
    "num_cpu_blocks": ((), "give cpu_bytes_to_use; the log says how many blocks that are"),
    **dict.fromkeys(("disk_path", "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache"), ((), _DISK)),
}
"""Further keys of vLLM's offloading connectors, which may only have these values, and why."""
NO_EFFECT: Mapping[str, str] = {
    "canonical_layout": "contents have the same layout for any number of devices",
}
"""Further keys that change nothing, and why."""
