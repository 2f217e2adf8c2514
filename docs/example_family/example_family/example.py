"""A decoder with pre-norm layers whose query and key heads are normalised before rotation, as Qwen 3 has them.

This module imports no JAX, because clients of the engine read config.json too.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    """The model that a config.json describes."""
    c = c.with_defaults(max_position_embeddings=32768, head_dim=128)
    c.refuse_unless("use_sliding_window", False)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms)
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position)
