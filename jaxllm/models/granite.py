"""Granite 3 and 4 (dense): Llama with factors of embeddings, scores, residuals and logits. Source: IBM's Granite 3.0 report, 2024."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Head
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, score_scale=c.number("attention_multiplier"))
    mlp = c.mlp(bias=c.boolean("mlp_bias"))
    layer = c.pre_norm_layer(attention, mlp, residual_scale=c.number("residual_multiplier"))
    head = Head(scale=1 / c.number("logits_scaling"))
    return c.decoder([layer] * c.num_layers, max_position, embedding_scale=c.number("embedding_multiplier"), head=head)
