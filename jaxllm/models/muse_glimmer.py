"""Muse Glimmer (text): norms of embeddings, of each head of q and k without weights, and before and after attention and MLP; attention with
gates; windows in three of four layers and rope there alone. Source: Meta's Muse Glimmer release, 2026.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Head, Layer, Norm, OutputGate
from jaxllm.models.config_reader import WINDOWED, ConfigReader
from jaxllm.models.granite_swa import thetas_of_layers

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "final_logit_softcapping": 20.0,
}


def read(c: ConfigReader) -> ModelConfig:
    """The text model of a checkpoint with or without a vision encoder."""
    c, names, norm = c.text_part("model.language_model", "lm_head")
    c = c.with_defaults(**DEFAULTS)
    every_full = [(c.num_layers - 1 - layer) % 4 == 0 for layer in range(c.num_layers)]
    windowed = c.layer_kinds(WINDOWED, lambda layer: not every_full[layer])
    thetas = thetas_of_layers(c)
    if c.raw.get("layer_rope_theta") is None:
        thetas = [0.0 if full else None for full in every_full]
    base, max_position = _attention(c)
    assert base.rope is not None
    layers = []
    for has_window, theta in zip(windowed, thetas, strict=True):
        rope = base.rope if theta is None else replace(base.rope, theta=theta) if theta else None
        window = c.integer("sliding_window") if has_window else None
        layers.append(_layer(c, replace(base, rope=rope, window=window)))
    fields = {
        "norm": c.rms_norm(norm),
        "embedding_norm": c.rms_norm("", weighted=False),
        "head": Head(c.number("output_multiplier"), c.number("final_logit_softcapping")),
    }
    return c.decoder(layers, max_position, names=names, **fields)


def _attention(c: ConfigReader) -> tuple[Attention, int]:
    """Attention with a rope, and the longest sequence."""
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    norm = c.rms_norm("", weighted=False)
    attention = replace(
        c.attention(rope),
        bias=bias,
        out_bias=bias,
        head_norms=(norm, norm),
        score_scale=c.number("qk_scale_factor") * c.head_dim**-0.5,
        gate=OutputGate("gate_proj", "sigmoid", by_head=False),
    )
    return attention, max_position


def _layer(c: ConfigReader, attention: Attention) -> Layer:
    eps = c.number("post_norm_eps")
    mlp = replace(c.mlp(), activation=c.activation("hidden_activation" if c.raw.get("hidden_activation") else "hidden_act"))
    return Layer(
        attention,
        mlp,
        attention_norm=c.rms_norm("input_layernorm", weight_offset=1.0),
        mlp_norm=c.rms_norm("pre_feedforward_layernorm", weight_offset=1.0),
        attention_post_norm=Norm("post_attention_layernorm", eps, weight_offset=1.0),
        mlp_post_norm=Norm("post_feedforward_layernorm", eps, weight_offset=1.0),
    )
