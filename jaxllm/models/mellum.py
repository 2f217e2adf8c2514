"""Mellum 2: Qwen 3 with experts, whose layers with and without windows have ropes of their own.

Source: JetBrains' Mellum 2 release, 2026.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer, Names, Rope
from jaxllm.models.config_reader import WINDOWED, ConfigReader
from jaxllm.models.qwen_moe import read_moe

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}
ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    if not c.raw.get("rope_parameters"):
        c = c.with_values(rope_parameters=ROPE)
    full, max_position = c.rope_of("full_attention")
    local, _ = c.rope_of("sliding_attention")
    windowed = c.layer_kinds(WINDOWED, lambda layer: False)
    layers = [_layer(c, local, c.integer("sliding_window")) if on else _layer(c, full, None) for on in windowed]
    return c.decoder(c.with_experts(layers, read_moe(c, 896)), max_position, names=Names(ignored=("mtp.",)))


def _layer(c: ConfigReader, rope: Rope, window: int | None) -> Layer:
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms, window=window)
    return c.pre_norm_layer(attention, c.mlp())
