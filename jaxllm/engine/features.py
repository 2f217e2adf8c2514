"""Registers the features that live in packages of their own. A package and its line here can be deleted together."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.engine.preparations import Preparation
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.fault_place import Place
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.kv_transfer import KVTransfer
from jaxllm.options.kv_events import KVEventsConfig
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllm.adapters import AdapterInfo, AdapterState
    from jaxllm.cache_spec import CacheLayout
    from jaxllm.engine.executor import Executor
    from jaxllm.engine.op_queue import OpQueue
    from jaxllm.layers.decoder import CausalLM
    from jaxllm.model_config import ModelConfig
    from jaxllm.runner.adaptation import Adaptation
    from jaxllm.runner.drafter import Drafter
    from jaxllm.scheduler.admission import ChunkRoom
    from jaxllm.scheduler.cache_observer import CacheObserver
    from jaxllm.scheduler.cache_tier import CacheTier
    from jaxllm.scheduler.draft_control import DraftControl
    from jaxllm.scheduler_stats import SchedulerStats

DRAFTERS: str | None = "jaxllm.speculative:make_drafter"
"""Makes the drafter of a speculative_config, as module:function; None: this build has no drafters."""
ADAPTERS: str | None = "jaxllm.lora:make_adapters"
"""Makes the slots and the manager of adapters; None: this build has no adapters."""
EXPERT_LOAD: str | None = "jaxllm.expert_load:make_expert_load"
"""Makes what adds up the tokens of experts and moves experts; None: this build does neither."""
KV_TIERS: str | None = "jaxllm.kv_tiers:KVTiers"
"""Makes the tiers of the prefix cache; None: this build has none."""
KV_EVENTS: str | None = "jaxllm.kv_events:KVEvents"
"""Makes what publishes events about the prefix cache; None: this build publishes none."""

ITEMS: tuple[str, ...] = ("jaxllm.vision:make_items", "jaxllm.audio:make_items")
"""Make what computes a kind of items in prompts, as module:function each; it returns None for an engine without such items."""

_NO_TIERS = "kv_offloading_size is set, but this build has no tiers; leave it out"
_NO_DRAFTERS = "speculative_config is set, but this build has no drafters; leave it out"

HOSTS: str | None = "jaxllm.hosts:open_hosts"
"""Connects the hosts of an engine; None: this build has one host. A host above 0 runs `FOLLOW`."""
FOLLOW = "jaxllm.hosts.follower:follow_until_told"


def check_speculative_config(config: EngineConfig) -> None:
    """Raise ConfigError for a speculative_config that is wrong in itself or that other options exclude. Does not import JAX."""
    if config.speculative.speculative_config is not None:
        _package(DRAFTERS, _NO_DRAFTERS).of_engine(config)


def check_own_store(config: EngineConfig) -> None:
    """Raise ConfigError if kv_transfer_config names a class that is no store. Imports its module, but not JAX."""
    transfer = KVTransferConfig.of(config.cache.kv_transfer_config)
    if transfer.is_own:
        _package(KV_TIERS, _NO_TIERS).check_own_store(transfer)


class Speculation(Protocol):
    """The drafter of a speculative_config and its control, as `DRAFTERS` makes them."""

    @property
    def drafter(self) -> "Drafter": ...

    @property
    def drafts_forced(self) -> bool:
        """Whether drafts are the tokens that grammars force."""

    @property
    def described(self) -> Mapping[str, Any]:
        """All that the compiled programs depend on, as JSON values."""

    def new_control(self, policy: KernelPolicy) -> "DraftControl":
        """Make the control that decides how many drafts requests get."""


class Adapters(Protocol):
    """The slots of an engine's adapters and their manager, as `ADAPTERS` makes them."""

    @property
    def adaptation(self) -> "Adaptation": ...

    @property
    def described(self) -> Mapping[str, Any]:
        """All that the compiled programs depend on, as JSON values."""

    def new_manager(self, executor: "Executor", ops: "OpQueue") -> "AdapterManager":
        """Make the manager that loads adapters and gives them slots."""


class AdapterManager(Preparation, Protocol):
    """See `ControlCalls` for the methods that are called from outside."""

    def add_adapter(self, name: str, path: str, replace: bool = False) -> int: ...
    def adapter_state(self, adapter_id: int) -> "AdapterState": ...
    def remove_adapter(self, name: str) -> bool: ...
    def list_adapters(self) -> "list[AdapterInfo]": ...
    def pin_adapter(self, name: str) -> None: ...

    def add_stats(self, stats: "SchedulerStats") -> None:
        """Set the adapter fields of the stats."""


class ExpertLoad(Protocol):
    """The expert load of an engine, as `EXPERT_LOAD` makes it."""

    def new_reader(self, ops: "OpQueue") -> "LoadReader":
        """Make the reader that fetches the tokens of experts and adds them up."""


class LoadReader(Protocol):
    """See `ControlCalls.expert_load` for what `table` returns."""

    def note_step(self, *, is_idle: bool) -> None:
        """A step was read; is_idle: there is nothing else to compute."""

    def read(self) -> None:
        """Count all steps dispatched so far. Waits for them."""

    def forget_places(self) -> None:
        """The weights are lost; they will be where they are loaded to."""

    def table(self) -> dict[str, Any]: ...

    def add_stats(self, stats: "SchedulerStats") -> None:
        """Set the expert fields of the stats."""


class KVTiers(Protocol):
    """The tiers of an engine's prefix cache, as `KV_TIERS` makes them."""

    @property
    def preparations(self) -> Sequence[Preparation]:
        """Preparations that requests may wait for before their blocks are loaded, once there are tiers."""

    def end_lease(self, transfer: KVTransfer) -> None:
        """Blocks that a prefill engine, this one or another, keeps for a request will not be fetched."""

    @property
    def prefill_address(self) -> KVTransfer | None:
        """See SteppedCore, as for the next one."""

    def meet(self, transfer: KVTransfer) -> None: ...

    def new_tiers(self, executor: "Executor", num_blocks: int, model_dir: Path) -> "tuple[CacheTier, ...]":
        """Make the tiers of a scheduler whose pool has so many blocks. model_dir: where the weights are. Raises ConfigError."""


class KVEvents(Protocol):
    """Publishes events about the prefix cache, as `KV_EVENTS` makes it."""

    def new_observer(
        self, config: EngineConfig, model: "ModelConfig", cache: "CacheLayout", tiers: "Sequence[CacheTier]"
    ) -> "CacheObserver":
        """Make what the next scheduler of the engine reports to, and its tiers."""

    def publish(self) -> None:
        """Hand on what has changed since the last call. Does not wait."""

    def add_stats(self, stats: "SchedulerStats") -> None:
        """Add its numbers."""

    def close(self) -> None: ...


class Items(Protocol):
    """Computes a kind of items in the prompts of an engine; an entry of `ITEMS` makes it."""

    @property
    def in_steps(self) -> tuple[str, ...]:
        """The parts of `jaxllm.runner.features` that it needs."""

    @property
    def described(self) -> Mapping[str, Any]:
        """All that the compiled programs depend on, as JSON values."""

    def new_room(self) -> "ChunkRoom":
        """Make the room of a scheduler."""


class Hosts(Protocol):
    """The other hosts of an engine, as one of them sees them."""

    config: EngineConfig

    def reported(self) -> AbstractContextManager[None]:
        """A block whose error ends all hosts."""

    def agree(self, phase: str, facts: dict[str, Any]) -> None:
        """Wait until all hosts are in this phase. Raises ConfigError, on all of them, if their facts differ."""

    def exchange(self, phase: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """The facts of all hosts in this phase, by rank."""

    def executor(self, own: "Executor") -> "Executor":
        """The executor of the engine's steps: on host 0 one that runs them on all hosts."""

    def started(self) -> None:
        """The start is over: a lost host is noticed sooner."""


def open_hosts(config: EngineConfig, model_dir: Path) -> Hosts | None:
    """Wait for all hosts of an engine, before JAX finds its devices. None if there is one. Raises ConfigError if one differs, or is
    missing."""
    options = config.parallel
    if options.nnodes == 1 and options.distributed_executor_backend != "ray":
        return None
    make = _maker(HOSTS, "nnodes or distributed_executor_backend is set, but this build has one host; leave it out")
    return make(config, model_dir)  # type: ignore[no-any-return]


def check_address(config: EngineConfig) -> None:
    """Raise ConfigError if a prefill engine cannot listen at its address, which it does once its weights are loaded."""
    if config.kv_transfer.is_prefill:
        _package(KV_TIERS, _NO_TIERS).check_address(config.kv_transfer)


def open_kv_events(config: EngineConfig, replica: int) -> KVEvents | None:
    """Open the publisher of events of engine `replica`; None if events are off. Raises ConfigError if an address cannot be used."""
    if not KVEventsConfig.of(config.observe.kv_events_config).publishes:
        return None
    make = _maker(KV_EVENTS, "kv_events_config is on, but this build publishes no events; leave it out")
    return make(config, replica)  # type: ignore[no-any-return]


def follow(config: EngineConfig) -> None:
    """Be a host above 0 of an engine, until host 0 ends. Raises as the start of an engine does."""
    _maker(HOSTS and FOLLOW, "node_rank is set, but this build has one host; leave it out")(config)


@dataclass(frozen=True)
class Features:
    """The features that an engine's options ask for."""

    speculation: Speculation | None = None
    adapters: Adapters | None = None
    expert_load: ExpertLoad | None = None
    items: Mapping[str, Items] = field(default_factory=dict)
    """By the package that computes them."""
    kv_tiers: KVTiers | None = None

    @classmethod
    def of(cls, config: EngineConfig, model_config: "ModelConfig", model: "CausalLM", mesh: "Mesh") -> "Features":
        """Raises ConfigError or ModelLoadError."""
        speculation: Speculation | None = None
        adapters: Adapters | None = None
        expert_load: ExpertLoad | None = None
        if config.speculative.speculative_config is not None:
            speculation = _maker(DRAFTERS, _NO_DRAFTERS, "drafts")(config, model_config)
        if config.lora.enable_lora:
            make = _maker(ADAPTERS, "enable_lora is set, but this build has no adapters; leave it out", "adapters")
            adapters = make(config, model_config, model, mesh)
        if config.observe.expert_load:
            missing = "expert_load or enable_eplb is set, but this build has neither; leave it out"
            in_steps = ("expert_counts", "expert_slots") if config.parallel.enable_eplb else ("expert_counts",)
            expert_load = _maker(EXPERT_LOAD, missing, *in_steps)(config, model_config)
        kv_tiers: KVTiers | None = None
        if config.cache.kv_offloading_size:
            kv_tiers = _maker(KV_TIERS, _NO_TIERS, "block_copies")(config)
        made = {entry.partition(":")[0]: _maker(entry, "")(config, model_config) for entry in ITEMS}
        items = {name: found for name, found in made.items() if found is not None}
        if not all(_are_in_steps(*found.in_steps) for found in items.values()):
            raise ConfigError(
                f"{model_config.architecture} takes images or audio, but the steps of this build take none; set language_model_only for "
                "text alone"
            )
        if items and speculation is not None and speculation.drafter.layers:
            raise ConfigError(
                f"speculative_config has a drafter with layers of its own, which sees token ids alone, but {model_config.architecture} "
                "takes images or audio; use the method ngram, or set language_model_only for text alone"
            )
        return cls(speculation, adapters, expert_load, items, kv_tiers)

    @property
    def drafter(self) -> "Drafter | None":
        return None if self.speculation is None else self.speculation.drafter

    @property
    def drafts_forced(self) -> bool:
        """Whether drafts are the tokens that grammars force."""
        return self.speculation is not None and self.speculation.drafts_forced

    @property
    def adaptation(self) -> "Adaptation | None":
        return None if self.adapters is None else self.adapters.adaptation

    @property
    def described(self) -> dict[str, Any]:
        """All that the compiled programs depend on, by feature."""
        found = {"drafter": self.speculation, "adapters": self.adapters, **self.items}
        return {name: feature.described for name, feature in found.items() if feature is not None}


NO_FEATURES = Features()


def fault_places() -> dict[str, Place]:
    """The places for injected failures of packages that have some, by name."""
    packages = [registered.partition(":")[0] for registered in (KV_TIERS, KV_EVENTS) if registered is not None]
    found = (importlib.import_module(f"{package}.fault_points").PLACES for package in packages)
    return {name: place for places in found for name, place in places.items()}


def _package(registered: str | None, missing: str, *in_steps: str) -> ModuleType:
    """The package of a feature. Raises ConfigError if there is none.

    in_steps: the parts of `jaxllm.runner.features` that it needs. To look for them imports JAX.
    """
    if registered is None or (in_steps and not _are_in_steps(*in_steps)):
        raise ConfigError(missing)
    return importlib.import_module(registered.partition(":")[0])


def _maker(registered: str | None, missing: str, *in_steps: str) -> Callable[..., Any]:
    """The function that makes a feature. Raises as `_package`."""
    return getattr(_package(registered, missing, *in_steps), (registered or "").partition(":")[2])  # type: ignore[no-any-return]


def check_request(params: SamplingParams, pooling: PoolingParams | None) -> None:
    """Raise InvalidRequestError for what the steps of this build cannot compute."""
    if params.prompt_logprobs is not None and not _are_in_steps("prompt_logprobs"):
        raise InvalidRequestError("prompt_logprobs is set, but this build has none; leave it out", "prompt_logprobs")
    if pooling is not None and not _are_in_steps("pooling"):
        raise InvalidRequestError("the request asks for vectors, but this build does not pool; use one that does")


def _are_in_steps(*names: str) -> bool:
    from jaxllm.runner.features import FEATURES

    return set(names) <= set(FEATURES)
