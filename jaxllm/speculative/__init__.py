"""Speculative decoding: drafters propose tokens, the model verifies them in one step. Importing it does not import JAX."""

from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig
from jaxllm.speculative.options import SpeculativeConfig, of_engine

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig
    from jaxllm.speculative.make import Drafters

__all__ = ["SpeculativeConfig", "make_drafter", "of_engine"]


def make_drafter(config: EngineConfig, target: "ModelConfig") -> "Drafters":
    """The drafter that an engine's options ask for, which they must. Raises ConfigError or ModelLoadError."""
    from jaxllm.speculative.make import make  # imports JAX

    return make(config, target)
