"""Token ids to vectors and vectors to logits."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import abstract_param, precision_of
from jaxllm.model_config import ModelConfig


class Embedding(nnx.Module):
    """A row per token. The output head, tied or not, is one too: its rows are then what hidden states are compared with."""

    def __init__(self, config: ModelConfig):
        self.weight = abstract_param((config.padded_vocab_size, config.hidden_size), ("vocab", "embed"), config.dtype)
        self.vocab_size = config.vocab_size
        self.dtype = config.dtype

    def __call__(self, token_ids_T: Array) -> Array:
        """The rows of these ids, in the type of the activations; ids must lie in the vocabulary."""
        rows_TD = self.weight[...].at[token_ids_T].get(mode="clip")
        return rows_TD.astype(self.dtype)

    def logits(self, hidden_TD: Array) -> Array:
        """Float32 scores; -inf in the columns that pad the vocabulary."""
        weight_VD = self.weight[...].astype(hidden_TD.dtype)
        logits_TV = jnp.einsum(
            "td,vd->tv", hidden_TD, weight_VD, precision=precision_of(hidden_TD.dtype), preferred_element_type=jnp.float32
        )
        if weight_VD.shape[0] == self.vocab_size:
            return logits_TV
        return jnp.where(jnp.arange(weight_VD.shape[0]) < self.vocab_size, logits_TV, -jnp.inf)
