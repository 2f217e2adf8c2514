"""Mistral: Llama with a sliding window over the keys, the same in every layer. Source: arXiv:2310.06825."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    rope, max_position = c.positions(131072)
    window = None if c.raw.get("sliding_window", 4096) is None else c.integer("sliding_window", 4096)
    attention = replace(c.attention(rope, num_kv_heads=8), window=window)
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position)
