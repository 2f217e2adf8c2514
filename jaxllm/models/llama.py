"""Llama 2 and 3. Sources: arXiv:2307.09288, arXiv:2407.21783."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=2048)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias)
    layer = c.pre_norm_layer(attention, c.mlp(bias=c.boolean("mlp_bias")))
    return c.decoder([layer] * c.num_layers, max_position, **fields)
