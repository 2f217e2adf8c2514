"""Qwen 2 and 2.5: Llama with a bias of q, k and v, and a window in some layers. Source: arXiv:2407.10671."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Layer
from jaxllm.models.config_reader import WINDOWED, ConfigReader


def read(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=32768, num_key_value_heads=32)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=True)
    return c.decoder(windowed_layers(c, attention), max_position, **fields)


def windowed_layers(c: ConfigReader, attention: Attention) -> list[Layer]:
    """Pre-norm layers with this attention. With use_sliding_window, it has a window in the layers that layer_types names, or from
    max_window_layers on."""
    full = c.pre_norm_layer(attention, c.mlp())
    if not c.boolean("use_sliding_window") or c.raw.get("sliding_window", 4096) is None:
        return [full] * c.num_layers
    windowed = replace(full, attention=replace(attention, window=c.integer("sliding_window", 4096)))
    first = c.count("max_window_layers", 28)
    return [windowed if on else full for on in c.layer_kinds(WINDOWED, lambda layer: layer >= first)]
