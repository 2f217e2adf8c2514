"""dots.llm1: each head of q and k is normalised before rotation; the experts of DeepSeek-V3. Source: arXiv:2506.05767."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import sigmoid_moe
from jaxllm.models.qwen2 import windowed_layers

DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "use_sliding_window": True,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    c.refuse_unless("scoring_func", "noaux_tc", "sigmoid")
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms)
    return c.decoder(c.with_experts(windowed_layers(c, attention), sigmoid_moe(c)), max_position)
