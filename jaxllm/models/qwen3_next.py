"""Qwen 3 Next: linear attention by the gated delta rule in most layers, gated attention in the others, mixtures of experts.

Sources: arXiv:2412.06464, arXiv:2505.06708.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, GatedDeltaNet, Layer, MoE, Names, NextToken, Norm
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen_moe import read_moe, with_experts

NAMES = Names(ignored=("mtp.",), unquantized=("linear_attn.in_proj_ba",))
"""The fp8 checkpoints keep in_proj_ba plain too: it is small, and exponentials of its outputs decay the states."""
NEXT_TOKEN = NextToken(
    layer="mtp.layers.{}",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    joined="mtp.fc",
    norm="mtp.norm",
)
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
    layers, max_position = hybrid_layers(c, c.mlp(), linear_attention(c))
    # Released checkpoints have a layer for multi-token prediction without saying so.
    num_spare = c.count("num_nextn_predict_layers", 1)
    fields = {"norm": offset_norm(c, "model.norm"), "names": NAMES, "num_spare_layers": num_spare, "next_token": NEXT_TOKEN}
    return c.decoder(with_experts(c, layers, gated_moe(c)), max_position, **fields)


def hybrid_layers(c: ConfigReader, mlp: MLP | MoE, linear: GatedDeltaNet) -> tuple[list[Layer], int]:
    """Layers of both kinds with this MLP, and the longest sequence."""
    c.refuse_unless("hidden_act", "silu")
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (offset_norm(c, "self_attn.q_norm"), offset_norm(c, "self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms, gated=True)
    every = c.integer("full_attention_interval", 4)
    kinds = c.layer_kinds(KINDS, lambda layer: (layer + 1) % every != 0)
    if all(kinds):
        c.faults.append("layer_types has linear_attention alone, supported: with at least one layer of full_attention")
    norms_of_layer = (offset_norm(c, "input_layernorm"), offset_norm(c, "post_attention_layernorm"))
    return [Layer(linear if is_linear else attention, mlp, *norms_of_layer) for is_linear in kinds], max_position


def gated_moe(c: ConfigReader) -> MoE:
    """Experts and a shared one, whose result is gated."""
    shared = MLP(c.integer("shared_expert_intermediate_size", 512), name="mlp.shared_expert")
    return read_moe(c, 512, shared=shared, shared_gate="shared_expert_gate")


def linear_attention(c: ConfigReader, **fields: Any) -> GatedDeltaNet:
    """fields: of the part, in place of Qwen 3 Next's."""
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
        **fields,
    )


def offset_norm(c: ConfigReader, name: str) -> Norm:
    """A norm whose weight is stored from zero."""
    return c.rms_norm(name, weight_offset=1.0)
