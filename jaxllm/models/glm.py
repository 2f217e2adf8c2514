"""GLM-4 (dense): half of each head rotated, neighbours together; GLM-4-0414 adds norms behind. Source: arXiv:2406.12793."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def read(c: ConfigReader, *, has_post_norms: bool = False) -> ModelConfig:
    """GLM-4-9B."""
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions(interleaved=True)
    attention = replace(c.attention(rope), bias=c.boolean("attention_bias"))
    layer = c.pre_norm_layer(attention, c.mlp(gate_up=("gate_up_proj",)))
    if has_post_norms:
        norms = (c.rms_norm("post_self_attn_layernorm"), c.rms_norm("post_mlp_layernorm"))
        layer = replace(layer, attention_post_norm=norms[0], mlp_post_norm=norms[1])
    return c.decoder([layer] * c.num_layers, max_position)


def read_glm4(c: ConfigReader) -> ModelConfig:
    """GLM-4-0414."""
    return read(c, has_post_norms=True)
