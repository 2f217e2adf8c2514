"""Mixtral: Mistral with a mixture of experts. Source: arXiv:2401.04088."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Routing
from jaxllm.models.config_reader import ConfigReader

EXPERTS = {"name": "block_sparse_moe", "gate_up": ("experts.{}.w1", "experts.{}.w3"), "down": "experts.{}.w2"}
"""Names of the weights of experts in Mixtral and Phi-3.5-MoE."""


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    rope, max_position = c.positions()
    window = c.integer_or_none("sliding_window")
    routing = Routing(c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2), renormalize=True)
    moe = c.moe(routing, c.integer("intermediate_size"), **EXPERTS)
    layer = c.pre_norm_layer(replace(c.attention(rope), window=window), moe)
    return c.decoder([layer] * c.num_layers, max_position)
