"""The decoder that the families share: every difference so far is a field of ModelConfig."""

from flax import nnx
from jax import Array

from jaxllm.layers.attend import Attend
from jaxllm.layers.attention import Attention
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import rope_angles
from jaxllm.model_config import ModelConfig


class DecoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        self.attention_norm = RMSNorm(config.hidden_size, "embed", config.dtype, eps=config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, "embed", config.dtype, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def __call__(self, x_TD: Array, angles: tuple[Array, Array], attend: Attend) -> Array:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), angles, attend)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class CausalLM(nnx.Module):
    """Token ids to hidden states, and hidden states to logits. Built without values: a loader gives them.

    The blocks are unrolled: scanning over stacked weights would copy the KV cache in every step.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nnx.List([DecoderBlock(config, layer) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, "embed", config.dtype, eps=config.rms_norm_eps)
        self.head = Embedding(config) if config.generates and not config.tie_word_embeddings else None

    def __call__(self, token_ids_T: Array, positions_T: Array, attend: Attend) -> Array:
        """Hidden states [T, D] after the last norm."""
        x_TD = self.embedding(token_ids_T)
        angles = rope_angles(self.config, positions_T)
        for block in self.blocks:
            x_TD = block(x_TD, angles, attend)
        return self.norm(x_TD)

    def logits(self, hidden_TD: Array) -> Array:
        """Float32 [T, V], of a model that generates; columns that pad the vocabulary are -inf."""
        return (self.embedding if self.head is None else self.head).logits(hidden_TD)
