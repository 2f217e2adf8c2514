"""Mistral: Llama with a sliding window over the keys, the same in every layer. Source: arXiv:2310.06825."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    rope, max_position = c.positions()
    window = c.integer_or_none("sliding_window")
    attention = replace(c.attention(rope), window=window)
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position, **fields)
