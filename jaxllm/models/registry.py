"""Maps architectures to model classes. To add a model, add a file here, a line below, and a Family in model_config."""

import importlib
import operator

import jax
from flax import nnx

from jaxllm.errors import ModelLoadError
from jaxllm.model_config import ModelConfig
from jaxllm.models.decoder import CausalLM
from jaxllm.quantization_config import LINEAR_MODULES

ARCHITECTURES = {
    "LlamaForCausalLM": "jaxllm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "jaxllm.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "jaxllm.models.qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "jaxllm.models.qwen:Qwen3ForCausalLM",
}
KNOWN = tuple(ARCHITECTURES)


def build_model(config: ModelConfig) -> CausalLM:
    """The model with shapes, types and axes, and no values. Raises ModelLoadError for an unknown architecture."""
    if config.architecture not in ARCHITECTURES:
        raise ModelLoadError(f"unknown architecture {config.architecture}; known: {', '.join(KNOWN)}")
    module, name = ARCHITECTURES[config.architecture].split(":")
    model = getattr(importlib.import_module(module), name)(config)
    for layer, block in enumerate(model.blocks):
        for part in LINEAR_MODULES:
            if config.is_quantized(layer, part):
                operator.attrgetter(part)(block).quantize()
    return model


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights as stored, on all devices together: copies of KV heads and padding not counted."""
    leaves = jax.tree.leaves(nnx.state(build_model(config.as_stored())))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
