"""Phi-3.5-MoE: LayerNorm, biases, experts chosen one after the other. Source: arXiv:2404.14219."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Head, Layer, Routing
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.mixtral import EXPERTS


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    c.refuse_unless("num_experts_per_tok", 2)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    window = c.integer_or_none("sliding_window")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, window=window)
    routing = Routing(c.integer("num_local_experts", 16), 2, "sparsemixer", jitter=c.number("router_jitter_noise", 0.01))
    moe = c.moe(routing, c.integer("intermediate_size"), **EXPERTS)
    names = ("input_layernorm", "post_attention_layernorm", "model.norm")
    norms = [c.layer_norm(name, "rms_norm_eps") for name in names]
    head = Head(bias=c.boolean("lm_head_bias"))
    return c.decoder([Layer(attention, moe, norms[0], norms[1])] * c.num_layers, max_position, norm=norms[2], head=head)
