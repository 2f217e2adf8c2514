"""OLMoE: norms over all heads of q and k, 64 experts. Source: arXiv:2409.02060."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Routing
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
    c.refuse_unless("clip_qkv", None)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, whole_norms=norms)
    routing = Routing(
        c.integer("num_local_experts", c.integer("num_experts")),
        c.integer("num_experts_per_tok"),
        renormalize=c.boolean("norm_topk_prob"),
    )
    layer = c.pre_norm_layer(attention, c.moe(routing, c.integer("intermediate_size")))
    return c.decoder([layer] * c.num_layers, max_position)
