"""Qwen 3 Next: linear attention by the gated delta rule in most layers, gated attention in the others, mixtures of experts.

Sources: arXiv:2412.06464, arXiv:2505.06708.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, GatedDeltaNet, Names, Norm
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen_moe import read_moe, with_experts

NAMES = Names(ignored=("mtp.",), unquantized=("linear_attn.in_proj_ba",))
"""The fp8 checkpoints keep in_proj_ba plain too: it is small, and exponentials of its outputs decay the states."""
KINDS = {"linear_attention": True, "full_attention": False}
"""Whether a layer has linear attention, by its entry in layer_types."""


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(
        max_position_embeddings=32768,
        num_key_value_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
    )
    c.refuse_unless("hidden_act", "silu")
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (_norm(c, "self_attn.q_norm"), _norm(c, "self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms, gated=True)
    linear = _linear_attention(c)
    shared = MLP(c.integer("shared_expert_intermediate_size", 512), name="mlp.shared_expert")
    moe = read_moe(c, 512, shared=shared, shared_gate="shared_expert_gate")
    every = c.integer("full_attention_interval", 4)
    kinds = c.layer_kinds(KINDS, lambda layer: (layer + 1) % every != 0)
    if all(kinds):
        c.faults.append("layer_types has linear_attention alone, supported: with at least one layer of full_attention")
    layer = c.pre_norm_layer(attention, c.mlp())
    layer = replace(layer, attention_norm=_norm(c, "input_layernorm"), mlp_norm=_norm(c, "post_attention_layernorm"))
    layers = with_experts(c, [replace(layer, attention=linear) if is_linear else layer for is_linear in kinds], moe)
    return c.decoder(layers, max_position, norm=_norm(c, "model.norm"), names=NAMES)


def _linear_attention(c: ConfigReader) -> GatedDeltaNet:
    key_heads, value_heads = c.integer("linear_num_key_heads", 16), c.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        c.faults.append(f"linear_num_key_heads is {key_heads}, must divide linear_num_value_heads, which is {value_heads}")
    return GatedDeltaNet(
        key_heads,
        value_heads,
        c.integer("linear_key_head_dim", 128),
        c.integer("linear_value_head_dim", 128),
        c.integer("linear_conv_kernel_dim", 4),
        c.rms_norm("linear_attn.norm"),
    )


def _norm(c: ConfigReader, name: str) -> Norm:
    return c.rms_norm(name, weight_offset=1.0)
