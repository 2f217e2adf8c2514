"""Seed-OSS: Llama with a bias of q, k and v. Source: ByteDance's Seed-OSS release, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=c.boolean("attention_bias"), out_bias=c.boolean("attention_out_bias"))
    return c.decoder([c.pre_norm_layer(attention, c.mlp(bias=c.boolean("mlp_bias")))] * c.num_layers, max_position)
