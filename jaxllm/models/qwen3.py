"""Qwen 3: each head of q and k is normalised before rotation; a window in some layers. Source: arXiv:2505.09388."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen2 import windowed_layers


def read(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    attention = c.attention(rope)
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(attention, bias=bias, out_bias=bias, head_norms=norms)
    return c.decoder(windowed_layers(c, attention), max_position, **fields)
