"""Laguna: layers with and without windows have other numbers of heads and other ropes; each head's output has a gate; experts chosen by
sigmoids with a correction bias, in addition to a shared one. Source: poolside's Laguna release, 2026.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer, MoE, OutputGate, Rope, Routing
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "gating": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "moe_routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
REQUIRED = {
    "moe_router_score_func": "sigmoid",
    "moe_router_logit_softcapping": 0,
    "moe_apply_router_weight_on_input": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "swa_attention_sink_enabled": False,
    "qkv_bias": False,
}
"""The only values of keys that are computed."""
BY_HEAD = {True: True, "per-head": True, "per-element": False}
"""Whether all values of a head have the same gate, by `gating`."""


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    if "mlp_layer_types" not in c.raw:
        c.refuse_unless("mlp_only_layers", [0])
    if not c.raw.get("rope_parameters"):
        c = c.with_values(rope_parameters=ROPE)
    full, max_position = c.rope_of("full_attention")
    local, _ = c.rope_of("sliding_attention", c.within("swa_rope_parameters").raw or None)
    windowed = c.layer_kinds(WINDOWED, lambda layer: False)
    heads = c.per_layer("num_attention_heads_per_layer", c.integer("num_attention_heads"))
    layers = [_layer(c, local if on else full, on, count) for on, count in zip(windowed, heads, strict=True)]
    return c.decoder(c.with_experts(layers, _moe(c)), max_position)


def _layer(c: ConfigReader, rope: Rope, has_window: bool, num_heads: int) -> Layer:
    c.refuse_unless("gating", *BY_HEAD)
    gate = OutputGate("g_proj", "softplus", by_head=BY_HEAD.get(c.raw["gating"], True))
    bias = c.boolean("attention_bias")
    attention = replace(
        c.with_values(num_attention_heads=num_heads).attention(rope),
        bias=bias,
        out_bias=bias,
        head_norms=(c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm")),
        window=c.integer("sliding_window") if has_window else None,
        gate=gate,
    )
    return c.pre_norm_layer(attention, c.mlp())


def _moe(c: ConfigReader) -> MoE:
    routing = Routing(
        c.integer("num_experts"),
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=True,
        scale=c.number("moe_routed_scaling_factor"),
        correction_bias="experts.e_score_correction_bias",
    )
    width = c.count("shared_expert_intermediate_size")
    shared = replace(c.mlp(name="mlp.shared_expert"), width=width) if width else None
    return c.moe(routing, c.integer("moe_intermediate_size"), shared=shared)
