"""Phi 3, 3.5 and 4: Llama with fused weights, longrope, and a part of each head rotated. Source: arXiv:2404.14219."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    rope, max_position = c.positions()
    window = c.integer_or_none("sliding_window")
    attention = replace(c.attention(rope), window=window, qkv=("qkv_proj",))
    layer = c.pre_norm_layer(attention, c.mlp(gate_up=("gate_up_proj",)))
    return c.decoder([layer] * c.num_layers, max_position)
