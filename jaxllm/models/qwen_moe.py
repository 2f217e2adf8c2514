"""Qwen 1.5, 2 and 3 with mixtures of experts. Sources: arXiv:2407.10671, arXiv:2505.09388."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer, MoE, Routing
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen2 import windowed_layers


def read_qwen2_moe(c: ConfigReader) -> ModelConfig:
    """With a shared expert, whose result is gated."""
    c = c.with_defaults(max_position_embeddings=32768, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), bias=c.boolean("qkv_bias", True))
    shared = MLP(c.integer("shared_expert_intermediate_size", 5632), c.activation(), name="mlp.shared_expert")
    moe = read_moe(c, 1408, shared=shared, shared_gate="shared_expert_gate")
    return c.decoder(with_experts(c, windowed_layers(c, attention), moe), max_position)


def read_qwen3_moe(c: ConfigReader, moe: MoE | None = None, **fields: Any) -> ModelConfig:
    """moe: its experts; None: those of the config. fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms)
    moe = read_moe(c, 768) if moe is None else moe
    return c.decoder(with_experts(c, windowed_layers(c, attention), moe), max_position, **fields)


def read_moe(c: ConfigReader, width: int, **fields: object) -> MoE:
    """The mixture of experts of the config. width: of an expert where the config names none."""
    num_experts = c.integer("num_local_experts", c.integer("num_experts"))
    routing = Routing(num_experts, c.integer("num_experts_per_tok"), renormalize=c.boolean("norm_topk_prob"))
    return c.moe(routing, c.integer("moe_intermediate_size", width), **fields)


def with_experts(c: ConfigReader, layers: list[Layer], moe: MoE) -> list[Layer]:
    """Layers with experts in every decoder_sparse_step-th, except where mlp_only_layers says otherwise."""
    every, dense = c.integer("decoder_sparse_step", 1), c.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        c.faults.append(f"mlp_only_layers is {dense!r}, must be a list of layers")
        dense = []
    return [replace(layer, mlp=moe) if i not in dense and (i + 1) % every == 0 else layer for i, layer in enumerate(layers)]
