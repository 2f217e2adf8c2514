"""The Flax class of `scaled`."""

from jax import Array

from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.linear import abstract_param
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import ONE_DEVICE, Shards


class ScaledLM(CausalLM):
    """A decoder whose hidden states are multiplied by a weight before the head."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        # A weight declares its shape, its axes (for tensor parallelism), its type and its name in the checkpoint.
        self.factor = abstract_param((config.hidden_size,), ("embed",), config.dtype, source="model.factor.weight", init="ones")

    def logits(self, hidden_TD: Array, shards: Shards = ONE_DEVICE) -> Array:
        """Float32 [T, V] of this device's part of the vocabulary."""
        return super().logits(hidden_TD * self.factor[...], shards)
