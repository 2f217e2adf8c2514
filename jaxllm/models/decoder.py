"""The decoder that the families share: every difference so far is a field of ModelConfig."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.attend import Attend
from jaxllm.layers.attention import Attention
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import rope_angles
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import ONE_DEVICE, Shards

Run = tuple[Array, Array]
"""Some of a step's tokens, one after the other: their x [T, D] and its norm, which is what the next layer takes."""


class DecoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        self.attention_norm = RMSNorm(config.hidden_size, "embed", config.dtype, eps=config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, "embed", config.dtype, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def __call__(
        self, runs: Sequence[Run], next_norm: RMSNorm, angles: tuple[Array, Array], attend: Attend, shards: Shards
    ) -> list[Run]:
        """From x and attention_norm(x) to the new x and next_norm of it: each sum of partial products ends in a norm."""
        attended = self.attention([normed_TD for _, normed_TD in runs], angles, attend, shards)
        runs = [shards.add_and_norm(part_TD, x_TD, self.mlp_norm) for part_TD, (x_TD, _) in zip(attended, runs, strict=True)]
        return [shards.add_and_norm(self.mlp(normed_TD, shards), x_TD, next_norm) for x_TD, normed_TD in runs]


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

    def __call__(self, token_ids_T: Array, positions_T: Array, attend: Attend, shards: Shards = ONE_DEVICE) -> Array:
        """Hidden states [T, D] after the last norm, whole on every device."""
        angles = rope_angles(self.config, positions_T)
        norms = [*(block.attention_norm for block in self.blocks), self.norm]
        runs = [
            shards.add_and_norm(self.embedding(ids_T, shards), None, norms[0])
            for ids_T in jnp.split(token_ids_T, shards.num_runs(len(token_ids_T)))
        ]
        for block, next_norm in zip(self.blocks, norms[1:], strict=True):
            runs = block(runs, next_norm, angles, attend, shards)
        return runs[0][1] if len(runs) == 1 else jnp.concatenate([normed_TD for _, normed_TD in runs])

    def logits(self, hidden_TD: Array, shards: Shards = ONE_DEVICE) -> Array:
        """Float32 [T, V] of this device's part of the vocabulary, of a model that generates; columns that pad it are -inf."""
        return (self.embedding if self.head is None else self.head).logits(hidden_TD, shards)
