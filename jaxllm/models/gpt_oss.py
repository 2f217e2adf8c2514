"""gpt-oss: windows in every other layer, attention sinks, experts with biases and a clamped SwiGLU. Source: arXiv:2508.10925."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Routing
from jaxllm.models.config_reader import WINDOWED, ConfigReader

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    c.refuse_unless("hidden_act", "silu")
    # What the kernels compute.
    c.refuse_unless("swiglu_alpha", 1.702)
    c.refuse_unless("swiglu_limit", 7.0)
    if not c.raw.get("rope_scaling") and not c.raw.get("rope_parameters"):
        c = c.with_defaults(rope_parameters=YARN)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    full = replace(c.attention(rope), bias=bias, out_bias=bias, sinks=True)
    windowed = replace(full, window=c.integer("sliding_window"))
    routing = Routing(
        c.integer("num_local_experts"),
        c.integer("num_experts_per_tok"),
        "softmax_of_chosen",
        router="router",
        router_bias=True,
    )
    names = {"gate_up": ("experts.gate_up_proj",), "down": "experts.down_proj"}
    moe = c.moe(routing, c.integer("intermediate_size"), **names, transposed=True, alternating=True, bias=True)
    moe = replace(moe, activation="swiglu_clamped")
    kinds = c.layer_kinds(WINDOWED, lambda layer: layer % 2 == 0)
    layers = {on: c.pre_norm_layer(windowed if on else full, moe) for on in (True, False)}
    return c.decoder([layers[on] for on in kinds], max_position)
