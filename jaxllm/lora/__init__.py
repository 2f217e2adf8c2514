"""LoRA adapters: what they change, how they are read, and which of them are in the slots of the device."""

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.layers.decoder import CausalLM
from jaxllm.lora.feature import LoRA
from jaxllm.model_config import ModelConfig


def make_adapters(config: EngineConfig, model_config: ModelConfig, model: CausalLM, mesh: Mesh) -> LoRA:
    """For an engine with enable_lora. Raises ConfigError."""
    return LoRA.of(config, model_config, model, mesh)
