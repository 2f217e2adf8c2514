"""Hy3: each head of q and k is normalised before rotation; experts chosen by sigmoids with a correction bias, behind a dense layer.
Source: Tencent's Hy3 release, 2026.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Routing
from jaxllm.model_parts.next_token import FINAL_NORM
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "first_k_dense_replace": 1,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    for name in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        c.refuse_unless(name, True)
    rope, max_position = c.positions()
    bias, mlp_bias = c.boolean("attention_bias"), c.boolean("mlp_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms)
    routing = Routing(
        c.integer("num_local_experts", c.integer("num_experts")),
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=c.boolean("route_norm", True),
        scale=c.number("router_scaling_factor"),
        router="router.gate",
        router_dtype="float32",
        correction_bias="expert_bias",
    )
    width, num_shared = c.integer("moe_intermediate_size"), c.count("num_shared_experts")
    shared = MLP(width * num_shared, c.activation(), bias=mlp_bias, name="mlp.shared_mlp") if num_shared else None
    layer = c.pre_norm_layer(attention, c.mlp(bias=mlp_bias))
    layers = c.with_experts([layer] * c.num_layers, c.moe(routing, width, shared=shared))
    return c.decoder(layers, max_position, next_token=FINAL_NORM)
