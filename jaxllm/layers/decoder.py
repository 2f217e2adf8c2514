"""The decoder that a `ModelConfig` describes."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.attention import GroupedQueryAttention
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import ONE_DEVICE, Shards

Run = tuple[Array, Array]
"""Some of a step's tokens, one after the other: their x [T, D] and its norm, which is what the next layer takes."""


class DecoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        parts, prefix = config.layers[layer], f"{config.layer_name(layer)}."
        width, dtype = config.hidden_size, config.dtype
        self.attention_norm = RMSNorm(parts.attention_norm, width, "embed", dtype, prefix=prefix)
        self.attention = GroupedQueryAttention(config, parts.attention, layer, prefix)
        self.mlp_norm = RMSNorm(parts.mlp_norm, width, "embed", dtype, prefix=prefix)
        self.mlp = GatedMLP(config, parts.mlp, prefix)

    def __call__(self, runs: Sequence[Run], next_norm: RMSNorm, step: Step) -> list[Run]:
        """From x and attention_norm(x) to the new x and next_norm of it: each sum of partial products ends in a norm."""
        shards = step.shards
        attended = self.attention([normed_TD for _, normed_TD in runs], step)
        runs = [shards.add_and_norm(part_TD, x_TD, self.mlp_norm) for part_TD, (x_TD, _) in zip(attended, runs, strict=True)]
        return [shards.add_and_norm(self.mlp(normed_TD, shards), x_TD, next_norm) for x_TD, normed_TD in runs]


class CausalLM(nnx.Module):
    """Token ids to hidden states, and hidden states to logits. Built without values: a loader gives them.

    The blocks are unrolled: scanning over stacked weights would copy the KV cache in every step.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embedding = Embedding(config, config.names.embedding)
        self.blocks = nnx.List([DecoderBlock(config, layer) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.norm, config.hidden_size, "embed", config.dtype)
        self.head = Embedding(config, config.names.head) if config.generates and not config.tie_word_embeddings else None

    def __call__(self, step: Step) -> Array:
        """Hidden states [T, D] after the last norm, whole on every device."""
        runs = self.run(self.embed(step), step, range(len(self.blocks)))
        return runs[0][1] if len(runs) == 1 else jnp.concatenate([normed_TD for _, normed_TD in runs])

    def embed(self, step: Step) -> list[Run]:
        """The tokens before the first layer, in as many runs as the devices compute."""
        shards, num_tokens = step.shards, len(step.token_ids_T)
        return [
            shards.add_and_norm(self.embedding(ids_T, shards), None, self._norm_before(0))
            for ids_T in jnp.split(step.token_ids_T, shards.num_runs(num_tokens))
        ]

    def run(self, runs: list[Run], step: Step, layers: range) -> list[Run]:
        """The tokens after these layers."""
        for layer in layers:
            runs = self.blocks[layer](runs, self._norm_before(layer + 1), step)
        return runs

    def logits(self, hidden_TD: Array, shards: Shards = ONE_DEVICE) -> Array:
        """Float32 [T, V] of this device's part of the vocabulary, of a model that generates; columns that pad it are -inf."""
        return (self.embedding if self.head is None else self.head).logits(hidden_TD, shards)

    def _norm_before(self, layer: int) -> RMSNorm:
        """The norm that a layer takes; behind the last layer, the model's own."""
        return self.blocks[layer].attention_norm if layer < len(self.blocks) else self.norm
