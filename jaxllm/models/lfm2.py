"""LFM2: gated short convolutions in most layers, attention in the others; experts in larger models. Source: arXiv:2511.23404."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer, MoE, Routing, ShortConv
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "intermediate_size": 12288,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
}
KINDS = {"conv": True, "full_attention": False}
"""Whether a layer has a convolution, by its entry in layer_types."""
NAMES: dict[str, Any] = {"name": "feed_forward", "gate_up": ("w1", "w3"), "down": "w2"}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    width = c.integer("block_ff_dim", c.integer("intermediate_size"))
    if c.boolean("block_auto_adjust_ff_dim", True):
        width = _adjusted(c, width)
    return _decoder(c, [MLP(width, **NAMES)] * c.num_layers)


def read_moe(c: ConfigReader) -> ModelConfig:
    """The first layers without experts."""
    c = c.with_defaults(**DEFAULTS)
    routing = Routing(
        c.integer("num_experts"),
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=c.boolean("norm_topk_prob"),
        scale=c.number("routed_scaling_factor", 1.0),
        correction_bias="expert_bias" if c.boolean("use_expert_bias", True) else None,
    )
    names: dict[str, Any] = {"name": "feed_forward", "gate_up": ("experts.{}.w1", "experts.{}.w3"), "down": "experts.{}.w2"}
    dense, moe = MLP(c.integer("intermediate_size"), **NAMES), c.moe(routing, c.integer("moe_intermediate_size"), **names)
    num_dense = c.count("num_dense_layers", 2)
    return _decoder(c, [dense if i < num_dense else moe for i in range(c.num_layers)])


def _adjusted(c: ConfigReader, width: int) -> int:
    """The width of an MLP of which the config has the one that it would have without a gate."""
    multiple = c.integer("block_multiple_of", 256)
    width = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


def _decoder(c: ConfigReader, mlps: list[MLP | MoE]) -> ModelConfig:
    c = c.with_values(rms_norm_eps=c.number("norm_eps", 1e-5))
    rope, max_position = c.positions()
    head_norms = c.rms_norm("self_attn.q_layernorm"), c.rms_norm("self_attn.k_layernorm")
    attention = replace(c.attention(rope), head_norms=head_norms, out="out_proj")
    if c.integer("hidden_size") % attention.num_heads:
        c.faults.append(f"num_attention_heads is {attention.num_heads}, must divide hidden_size")
    kernel_size = c.integer("conv_L_cache", 3)
    if kernel_size == 1:
        c.faults.append("conv_L_cache is 1, must be at least 2")
    head_dim = c.integer("hidden_size") // attention.num_heads
    conv = ShortConv(attention.num_heads, head_dim, kernel_size, c.boolean("conv_bias"))
    full = c.raw.get("full_attn_idxs")
    kinds = c.layer_kinds(KINDS, lambda layer: isinstance(full, list) and layer not in full)
    norms = c.rms_norm("operator_norm"), c.rms_norm("ffn_norm")
    layers = [Layer(conv if is_conv else attention, mlp, *norms) for is_conv, mlp in zip(kinds, mlps, strict=True)]
    tied = c.boolean("tie_embedding", c.boolean("tie_word_embeddings", True))
    return c.decoder(layers, max_position, norm=c.rms_norm("model.embedding_norm"), tie_word_embeddings=tied)
