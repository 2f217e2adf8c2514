"""EngineArgs: an engine's options as one flat object, for scripts written for vLLM. `EngineConfig` is what the engine itself takes."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from jaxllm.config import (
    CacheOptions,
    CompileOptions,
    EngineConfig,
    ModelOptions,
    ObserveOptions,
    ParallelOptions,
    SchedulerOptions,
)
from jaxllm.vllm_flags import as_options


@dataclass(frozen=True, init=False, kw_only=True)
class EngineArgs(ModelOptions, CacheOptions, SchedulerOptions, ParallelOptions, CompileOptions, ObserveOptions):
    """Takes the engine's options and vLLM's names (`jaxllm.vllm_flags`); `LLM(**dataclasses.asdict(args))` works too.

    Raises ConfigError for unknown names, wrong values and what vLLM's names ask for and is not to be had here.
    """

    def __init__(self, model: str = ModelOptions.model, **options: Any):
        for name, value in EngineConfig.from_options(model=model, **as_options(options)).flat().items():
            object.__setattr__(self, name, value)

    def create_engine_config(self) -> EngineConfig:
        """The same options by group."""
        return EngineConfig.from_options(**dataclasses.asdict(self))


class AsyncEngineArgs(EngineArgs):
    """EngineArgs, as vLLM calls them for its asynchronous engine."""


class FromOptions:
    """An engine that is made from an EngineConfig."""

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """An engine from flat options, e.g. `LLMEngine.from_options(model="demo", max_num_seqs=8)`."""
        return cls(EngineConfig.from_options(**options))  # type: ignore[call-arg]

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The same from EngineArgs."""
        return cls(engine_args.create_engine_config())  # type: ignore[call-arg]
