"""EngineArgs: an engine's options as one flat object, for scripts written for vLLM. `EngineConfig` is what the engine itself takes."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from jaxllm.config import (
    CacheOptions,
    CompileOptions,
    EngineConfig,
    KVTransferOptions,
    LoRAOptions,
    ModelOptions,
    MultiModalOptions,
    ObserveOptions,
    ParallelOptions,
    SchedulerOptions,
    SpeculativeOptions,
    flags,
)
from jaxllm.flag_arguments import add_flag
from jaxllm.vllm_compat.arguments import add_vllm_arguments
from jaxllm.vllm_compat.environment import with_engine_variables
from jaxllm.vllm_compat.flags import SHORT_NAMES, TABLE, as_options


@dataclass(frozen=True, init=False, kw_only=True)
class EngineArgs(
    ModelOptions,
    CacheOptions,
    KVTransferOptions,
    SchedulerOptions,
    SpeculativeOptions,
    LoRAOptions,
    MultiModalOptions,
    ParallelOptions,
    CompileOptions,
    ObserveOptions,
):
    """Takes the engine's options and vLLM's names (`jaxllm.vllm_compat.flags`); `LLM(**dataclasses.asdict(args))` works too.

    Raises ConfigError for unknown names, wrong values and what vLLM's names ask for and is not to be had here.
    """

    def __init__(self, model: str = ModelOptions.model, **options: Any):
        config = EngineConfig.from_options(model=model, **with_engine_variables(as_options(options)))
        for name, value in config.flat().items():
            object.__setattr__(self, name, value)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the engine's options and vLLM's flags to a script's parser, which is returned.

        The parsed namespace has a value for each, so `EngineArgs(**vars(namespace))` works too. Refused flags fail in parsing.
        """
        groups: dict[str, argparse._ArgumentGroup] = {}
        for flag in flags():
            if flag.group not in groups:
                groups[flag.group] = parser.add_argument_group(flag.group)
            add_flag(groups[flag.group], flag, {**SHORT_NAMES, "quantization": "-q"}, flag.default)
        add_vllm_arguments(parser, at_once=True)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From the namespace of a parser that `add_cli_args` has extended; it may have other values too. Raises ConfigError."""
        given = vars(args)
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        own = {name: given[name] for name in defaults if name in given and given[name] != defaults[name]}
        of_vllm = {name: given[name] for name in TABLE if given.get(name) is not None}
        return cls(**{**of_vllm, **own})

    def create_engine_config(self) -> EngineConfig:
        """The options as an EngineConfig."""
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
        """An engine from EngineArgs."""
        return cls(engine_args.create_engine_config())  # type: ignore[call-arg]
