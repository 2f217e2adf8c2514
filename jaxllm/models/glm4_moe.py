"""GLM-4.5 with experts: half of each head rotated, sigmoid routing with a correction bias. Source: arXiv:2508.06471."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import sigmoid_moe

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=c.boolean("attention_bias"))
    if c.boolean("use_qk_norm"):
        attention = replace(attention, head_norms=(c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm")))
    dense, sparse = c.pre_norm_layer(attention, c.mlp()), c.pre_norm_layer(attention, sigmoid_moe(c))
    num_dense = c.count("first_k_dense_replace")
    return c.decoder([dense if i < num_dense else sparse for i in range(c.num_layers)], max_position)
