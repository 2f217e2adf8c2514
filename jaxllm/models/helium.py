"""Helium: Llama whose rotation takes neighbouring values of a head together. Source: Kyutai's Helium 1 release, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=4096, num_key_value_heads=20, head_dim=128, rms_norm_eps=1e-8)
    rope, max_position = c.positions(interleaved=True)
    attention = replace(c.attention(rope), bias=c.boolean("attention_bias"))
    return c.decoder([c.pre_norm_layer(attention, c.mlp(bias=c.boolean("mlp_bias")))] * c.num_layers, max_position)
