"""GLM-4.5 with experts: half of each head rotated, sigmoid routing with a correction bias. GLM-4.7-Flash and GLM-5: these experts with
the attention of DeepSeek-V3 and V3.2, in GLM-5 with layers that share a choice of tokens.

Sources: arXiv:2508.06471, the GLM-5 release.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models import deepseek
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
DEFAULTS_LITE = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
}
DEFAULTS_DSA = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=c.boolean("attention_bias"))
    if c.boolean("use_qk_norm"):
        attention = replace(attention, head_norms=(c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm")))
    layers = c.with_experts([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, sigmoid_moe(c))
    return c.decoder(layers, max_position)


def read_lite(c: ConfigReader) -> ModelConfig:
    return deepseek.read_v3(c.with_defaults(**DEFAULTS_LITE))


def read_dsa(c: ConfigReader) -> ModelConfig:
    return deepseek.read_v32(c.with_defaults(**DEFAULTS_DSA))
