"""Ministral 8B: Mistral with a window in some layers. Source: the Ministral release, 2024."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import WINDOWED, ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    rope, max_position = c.positions()
    window = c.integer_or_none("sliding_window")
    windowed = c.layer_kinds(WINDOWED, lambda layer: window is not None)
    attention = c.attention(rope)
    layers = [c.pre_norm_layer(replace(attention, window=window if on else None), c.mlp()) for on in windowed]
    return c.decoder(layers, max_position)
