"""Registers what engines add to their steps, a file or folder each. A feature and its line here can be deleted together."""

import importlib
from types import ModuleType

from jaxllm.config import EngineConfig
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.runner.host_plan import HostPlan
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.step_feature import FeatureParts, StepFeature
from jaxllm.runner.weights import WithWeights

FEATURES = (
    "encoder",
    "drafts",
    "token_split",
    "adapters",
    "rope_delta",
    "images",
    "audio",
    "audio_tokens",
    "expert_slots",
    "expert_counts",
    "prompt_logprobs",
    "pooling",
    "state_copies",
    "block_copies",
)
"""Modules here, in the order of `StepFeature.before`. Each has make(parts), which returns None for engines without the feature.

A module may also have two functions of (config, model_config, model), for the layers of that model: `weights`, a part of the engine with
weights of its own, or None; `memory_bytes`, what the feature takes of each device's memory in addition to the model. One may have
`host_plan`, of (config, model_config, memory plan of the devices): what it takes of the host's; and `check_machine`, of (config), which
raises ConfigError before a start if this machine lacks what the feature takes.
"""


def make_features(parts: FeatureParts) -> tuple[StepFeature, ...]:
    """The features of an engine."""
    made = (module.make(parts) for module in _modules())
    return tuple(feature for feature in made if feature is not None)


def weights_of_features(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> dict[str, WithWeights | None]:
    """The parts with weights that features have, by the name of their module."""
    return {
        name: module.weights(config, model_config, model)
        for name, module in zip(FEATURES, _modules(), strict=True)
        if hasattr(module, "weights")
    }


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Bytes on each device that features take in addition to the model."""
    return sum(module.memory_bytes(config, model_config, model) for module in _modules() if hasattr(module, "memory_bytes"))


def check_machine(config: EngineConfig) -> None:
    """Raise ConfigError if this machine lacks what features take."""
    for module in _modules():
        if hasattr(module, "check_machine"):
            module.check_machine(config)


def host_plan(config: EngineConfig, model_config: ModelConfig, plan: MemoryPlan) -> HostPlan | None:
    """Plan the host memory of features; None: no feature plans any."""
    plans = (module.host_plan(config, model_config, plan) for module in _modules() if hasattr(module, "host_plan"))
    return next((found for found in plans if found is not None), None)


def _modules() -> list[ModuleType]:
    return [importlib.import_module(f"{__name__}.{name}") for name in FEATURES]
