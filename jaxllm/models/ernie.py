"""ERNIE 4.5 (dense): Llama with neighbouring values of a head rotated together. Source: Baidu's ERNIE 4.5 report, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions(interleaved=True)
    bias = c.boolean("use_bias")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias)
    return c.decoder([c.pre_norm_layer(attention, c.mlp(bias=bias))] * c.num_layers, max_position)
