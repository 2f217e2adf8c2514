"""Jais 2: Llama with LayerNorm, and without a gate in its MLP, whose activation is the square of relu. Source: the Jais 2 release, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=8192, hidden_act="relu2", attention_bias=True, mlp_bias=True)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias)
    mlp = MLP(c.integer("intermediate_size"), c.activation(), gated=False, gate_up=("up_proj",), bias=c.boolean("mlp_bias"))
    layer = Layer(attention, mlp, c.layer_norm("input_layernorm"), c.layer_norm("post_attention_layernorm"))
    return c.decoder([layer] * c.num_layers, max_position, norm=c.layer_norm("model.norm"))
