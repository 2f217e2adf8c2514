"""Which layers of a model have a mixture of experts."""

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE


def mixture_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers of a model that have a mixture of experts."""
    return tuple(i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoE))
