"""Heads that score the classes of prompts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import make_norm
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Classifier, ClassifierHidden


class ClassifierHead(nnx.Module):
    """Scores of classes, in float32, of pooled vectors. Every device has it whole."""

    def __init__(self, config: ModelConfig, part: Classifier):
        self.part = part
        self.hidden = None if part.hidden is None else HiddenLayer(config, part.hidden)
        num_classes, num_tokens = len(part.labels), len(part.token_ids)
        if num_tokens:
            rows = tuple(_row(f"{part.out}.weight", config, token_id) for token_id in part.token_ids)
            source = Source(rows, 0, (0, 1))
            self.rows = abstract_param((num_tokens, config.hidden_size), ("class", "embed"), config.dtype, source=source)
        else:
            shape, modules = (config.hidden_size, num_classes), [Module(part.out, (num_classes,))]
            self.out = Linear("rd,dc->rc", shape, ("embed", "class"), config.dtype, modules=modules, bias=part.bias)

    def __call__(self, x_RD: Array, use_activation_R: Array) -> Array:
        """Float32 [R, classes]: scores, where `use_activation_R` probabilities."""
        if self.hidden is not None:
            x_RD = self.hidden(x_RD)
        if self.part.token_ids:
            *others, row_D = self.rows[...].astype(jnp.float32)
            score_RC = jnp.sum(x_RD * (row_D - others[0] if others else row_D), axis=1, keepdims=True)
        else:
            score_RC = self.out(x_RD)
        if self.part.activation == "identity":
            return score_RC
        activate = jax.nn.sigmoid if self.part.activation == "sigmoid" else jax.nn.softmax
        return jnp.where(use_activation_R[:, None] > 0, activate(score_RC), score_RC)


class HiddenLayer(nnx.Module):
    """norm(activation(dense(x)))."""

    def __init__(self, config: ModelConfig, part: ClassifierHidden):
        shape = (config.hidden_size, config.hidden_size)
        modules = [Module(part.dense, (config.hidden_size,))]
        self.dense = Linear("rd,de->re", shape, ("embed", "embed"), config.dtype, modules=modules, bias=part.bias)
        self.activation = jnp.tanh if part.activation == "tanh" else ACTIVATIONS[part.activation]
        self.norm = make_norm(part.norm, config.hidden_size, config.dtype)

    def __call__(self, x_RD: Array) -> Array:
        return self.norm(self.activation(self.dense(x_RD)))


def _row(name: str, config: ModelConfig, token_id: int) -> Tensor:
    """The row of a token in a tensor of the vocabulary's."""
    return Tensor(name, (config.vocab_size, config.hidden_size), (1, config.hidden_size), rows=(token_id, token_id + 1))
