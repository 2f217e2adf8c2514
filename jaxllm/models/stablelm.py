"""StableLM 2: LayerNorm, a quarter of each head rotated. Source: arXiv:2402.17834."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=4096, num_key_value_heads=32, partial_rotary_factor=0.25)
    c.refuse_unless("qk_layernorm", False)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=c.boolean("use_qkv_bias"))
    is_parallel = c.boolean("use_parallel_residual")
    mlp_norm = None if is_parallel else c.layer_norm("post_attention_layernorm")
    layer = Layer(attention, c.mlp(), c.layer_norm("input_layernorm"), mlp_norm, parallel=is_parallel)
    return c.decoder([layer] * c.num_layers, max_position, norm=c.layer_norm("model.norm"))
