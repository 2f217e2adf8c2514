"""Registers parallel backends: ways to distribute an engine over devices other than splitting each layer. A package and its entry
here can be deleted together. Does not import JAX."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig, ParallelOptions
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllm.engine.executor import DeviceRunner
    from jaxllm.layers.decoder import CausalLM
    from jaxllm.model_config import ModelConfig
    from jaxllm.runner.memory import MemoryPlan
    from jaxllm.runner.stage import RunnerParts, Stage
    from jaxllm.runner.token_split import TokenSplit
    from jaxllm.scheduler.interface import AnyScheduler
    from jaxllm.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class ParallelBackend:
    """Functions of a parallel backend, each as module:function; None: as without one."""

    check: str
    """(config, model_config): raise ConfigError for a model or for options that exclude it. Does not import JAX."""
    stages: str | None = None
    """(config, model_config, plan_of) → stages, of which plan_of makes memory plans from a model and its layers."""
    runner: str | None = None
    """(parts) → runner."""
    scheduler: str | None = None
    """(new_scheduler, parallel options) → scheduler, of those that new_scheduler makes."""
    token_split: str | None = None
    """(mesh, kernel policy) → the devices that split tokens."""


BACKENDS = {
    "stages": ParallelBackend(
        "jaxllm.pipeline.split:check_stages",
        stages="jaxllm.pipeline.plan:plan_stages",
        runner="jaxllm.pipeline.plan:pipeline_runner",
    ),
    "ranks": ParallelBackend(
        "jaxllm.data_parallel.options:check_ranks",
        scheduler="jaxllm.data_parallel.scheduler:ranks_scheduler",
    ),
    "context": ParallelBackend(
        "jaxllm.context.refused:check_model",
        token_split="jaxllm.context.devices:make_context",
    ),
}
OPTIONS = {
    "stages": "pipeline_parallel_size",
    "ranks": "data_parallel_size with enable_expert_parallel",
    "context": "prefill_context_parallel_size",
}


def check_backend(config: EngineConfig, model_config: "ModelConfig") -> None:
    """Raise ConfigError if the model or other options exclude a parallel backend that is requested."""
    for backend in _requested(config.parallel):
        _load(backend.check)(config, model_config)


def make_stages(
    config: EngineConfig, model_config: "ModelConfig", plan_of: "Callable[[CausalLM, range], MemoryPlan]"
) -> "tuple[Stage, ...]":
    """The stages of an engine; without a backend a single one. plan_of: the memory plan of a model with these layers, checked."""
    if (make := _part(config.parallel, "stages")) is not None:
        return make(config, model_config, plan_of)  # type: ignore[no-any-return]
    from jaxllm.layers.build import build_model
    from jaxllm.runner.stage import Stage

    whole, layers = build_model(model_config), range(model_config.num_layers)
    return (Stage(layers, whole, plan_of(whole, layers)),)


def make_runner(parts: "RunnerParts") -> "DeviceRunner":
    """Make the runner of the stages on their meshes."""
    parallel = parts.config.parallel
    if (make := _part(parallel, "runner")) is not None:
        return make(parts)  # type: ignore[no-any-return]
    (stage,), (mesh,) = parts.stages, parts.meshes
    return parts.make(stage, mesh, _token_split(parts, mesh))


def make_scheduler(parallel: ParallelOptions, new_scheduler: "Callable[[], Scheduler]") -> "AnyScheduler":
    """The scheduler of an engine, of as many as it needs."""
    make = _part(parallel, "scheduler")
    return new_scheduler() if make is None else make(new_scheduler, parallel)


def _token_split(parts: "RunnerParts", mesh: "Mesh") -> "TokenSplit | None":
    make = _part(parts.config.parallel, "token_split")
    return None if make is None else make(mesh, parts.policy)  # type: ignore[no-any-return]


def _part(parallel: ParallelOptions, name: str) -> Callable[..., Any] | None:
    """The requested backend's function of this name; None: it has none, or no backend is requested."""
    registered = next((getattr(backend, name) for backend in _requested(parallel)), None)
    return None if registered is None else _load(registered)


def _requested(parallel: ParallelOptions) -> list[ParallelBackend]:
    """The parallel backends that an engine's options request. More than one pass no check."""
    requested = {
        "stages": parallel.pipeline_parallel_size > 1 or parallel.pipeline_parallel_layers is not None,
        "ranks": parallel.num_ranks > 1,
        "context": parallel.prefill_context_parallel_size > 1,
    }
    if missing := [name for name, is_requested in requested.items() if is_requested and name not in BACKENDS]:
        raise ConfigError(f"this build has no {OPTIONS[missing[0]]}; leave it out")
    return [BACKENDS[name] for name, is_requested in requested.items() if is_requested]


def _load(registered: str) -> Callable[..., Any]:
    module, _, name = registered.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
