"""Arcee: Llama without a gate in its MLP, whose activation is the square of relu. Source: Arcee's AFM-4.5B release, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="relu2")
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias)
    mlp = MLP(c.integer("intermediate_size"), c.activation(), gated=False, gate_up=("up_proj",), bias=c.boolean("mlp_bias"))
    return c.decoder([c.pre_norm_layer(attention, mlp)] * c.num_layers, max_position)
