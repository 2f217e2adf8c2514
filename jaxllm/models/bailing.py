"""Ling 2 and Ring 2, and Sarvam's mixture: each head of q and k is normalised before rotation of a part of it, the experts of DeepSeek-V3.
Source: arXiv:2510.22115.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Names
from jaxllm.model_parts.next_token import FINAL_NORM
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import grouped_moe

NAMES = Names(embedding="model.word_embeddings")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}
DEFAULTS_SARVAM = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_theta": 8000000.0,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1024,
}
REQUIRED = {
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "use_bias": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}
"""The only values of keys that are computed."""
ROUTER_DTYPES = {"fp32": "float32", "bf16": None}
"""As `Routing` has it."""


def read(c: ConfigReader) -> ModelConfig:
    """Ling 2 and Ring 2."""
    c = c.with_defaults(**DEFAULTS)
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    of_hub = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
    c = c.with_values(**{ours: c.raw[theirs] for theirs, ours in of_hub.items() if theirs in c.raw})
    rope, max_position = c.positions()
    attention = replace(
        c.attention(rope),
        bias=c.boolean("attention_bias"),
        head_norms=(c.rms_norm("attention.query_layernorm"), c.rms_norm("attention.key_layernorm")),
        name="attention",
        qkv=("query_key_value",),
        out="dense",
    )
    layers = [c.pre_norm_layer(attention, c.mlp())] * c.num_layers
    c.refuse_unless("router_dtype", *ROUTER_DTYPES)
    moe = grouped_moe(c, "sigmoid", "gate.expert_bias", ROUTER_DTYPES.get(str(c.raw.get("router_dtype"))))
    c.refuse_unless("moe_shared_expert_intermediate_size", c.integer("moe_intermediate_size"))
    return c.decoder(c.with_experts(layers, moe), max_position, names=NAMES, next_token=FINAL_NORM)


def read_sarvam(c: ConfigReader) -> ModelConfig:
    return read(c.with_defaults(**DEFAULTS_SARVAM))
