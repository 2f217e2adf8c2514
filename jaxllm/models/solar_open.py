"""Solar Open: Llama with the experts of DeepSeek-V3 in every layer. Source: Upstage's Solar Open release, 2026."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import sigmoid_moe

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1280,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    c.refuse_unless("use_qk_norm", False)
    c.refuse_unless("first_k_dense_replace", 0)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=c.boolean("attention_bias"))
    return c.decoder([c.pre_norm_layer(attention, sigmoid_moe(c))] * c.num_layers, max_position)
