"""Trinity: norms before and after attention and MLP, gated attention, windows in three of four layers and rope there alone, experts chosen
by sigmoids with a correction bias. Source: Arcee's Trinity release, 2025.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer, MoE, OutputGate, Rope, Routing
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS = {
    "max_position_embeddings": 16384,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "route_scale": 1.0,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    c.refuse_unless("score_func", "sigmoid")
    c.refuse_unless("route_norm", True)
    c.refuse_unless("n_group", 1)
    c.refuse_unless("attention_bias", False)
    rope, max_position = c.positions()
    every, num_dense = c.integer("global_attn_every_n_layers"), c.count("num_dense_layers")
    windowed = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % every != 0)
    layers = [_layer(c, rope if on else None, c.mlp() if i < num_dense else _moe(c)) for i, on in enumerate(windowed)]
    scale = c.integer("hidden_size") ** 0.5 if c.boolean("mup_enabled") else 1.0
    return c.decoder(layers, max_position, embedding_scale=scale)


def _layer(c: ConfigReader, rope: Rope | None, mlp: MLP | MoE) -> Layer:
    """rope: of layers with windows; None: of others."""
    attention = replace(
        c.attention(rope),
        head_norms=(c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm")),
        window=None if rope is None else c.integer("sliding_window"),
        gate=OutputGate("gate_proj", "sigmoid", by_head=False),
    )
    before = (c.rms_norm("input_layernorm"), c.rms_norm("pre_mlp_layernorm"))
    return Layer(attention, mlp, *before, c.rms_norm("post_attention_layernorm"), c.rms_norm("post_mlp_layernorm"))


def _moe(c: ConfigReader) -> MoE:
    routing = Routing(
        c.integer("num_experts"),
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=True,
        scale=c.number("route_scale"),
        router="router.gate",
        correction_bias="expert_bias",
    )
    width, num_shared = c.integer("moe_intermediate_size"), c.count("num_shared_experts")
    shared = MLP(width * num_shared, c.activation(), name="mlp.shared_experts") if num_shared else None
    return c.moe(routing, width, shared=shared)
