"""Apertus: Llama without a gate in its MLP, whose activation is learned, and with norms of each head of q and k.
Source: arXiv:2509.14233.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer
from jaxllm.models.config_reader import ConfigReader

DEFAULTS: dict[str, Any] = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu"}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    c.refuse_unless("hidden_act", "xielu")
    c.refuse_unless("qk_norm", True)
    c.refuse_unless("post_norm", False)
    c.refuse_unless("mlp_bias", False)
    if not c.raw.get("rope_scaling") and not c.raw.get("rope_parameters"):
        c = c.with_values(rope_parameters=ROPE)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms)
    mlp = MLP(c.integer("intermediate_size"), gated=False, xielu="act_fn", gate_up=("up_proj",))
    layer = Layer(attention, mlp, c.rms_norm("attention_layernorm"), c.rms_norm("feedforward_layernorm"))
    return c.decoder([layer] * c.num_layers, max_position)
