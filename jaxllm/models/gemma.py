"""Gemma 1, 2 and 3 (text): weights of norms from zero, scaled embeddings; norms before and after, soft caps and windows.

Sources: arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786.
"""

import math
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Head, Layer, Norm, Rope
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
DEFAULTS_2: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def read(c: ConfigReader) -> ModelConfig:
    """Gemma 1."""
    c = c.with_defaults(**DEFAULTS, max_position_embeddings=8192, num_key_value_heads=16)
    rope, max_position = c.positions()
    layer = Layer(_attention(c, rope), _mlp(c), _norm(c, "input_layernorm"), _norm(c, "post_attention_layernorm"))
    return _decoder(c, [layer] * c.num_layers, max_position)


def read_gemma2(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(
        **DEFAULTS, **DEFAULTS_2, max_position_embeddings=8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    rope, max_position = c.positions()
    attention = _scaled(c, _attention(c, rope))
    windowed = replace(attention, window=c.integer("sliding_window"))
    kinds = c.layer_kinds(WINDOWED, lambda layer: layer % 2 == 0)
    return _decoder(c, [_sandwich(c, windowed if on else attention) for on in kinds], max_position)


def read_gemma3(c: ConfigReader) -> ModelConfig:
    """The text model of a checkpoint with or without an encoder of images."""
    c, names, norm = c.text_part()
    c.refuse_unless("use_bidirectional_attention", False)
    c = c.with_defaults(
        **DEFAULTS,
        **DEFAULTS_2,
        vocab_size=262208,
        max_position_embeddings=131072,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    )
    rope, _ = c.rope_of("full_attention")
    local, _ = c.rope_of("sliding_attention", {"rope_theta": c.number("rope_local_base_freq")})
    attention = _scaled(c, _attention(c, rope))
    attention = replace(attention, head_norms=(_norm(c, "self_attn.q_norm"), _norm(c, "self_attn.k_norm")))
    windowed = replace(attention, rope=local, window=c.integer("sliding_window"))
    every = c.integer("sliding_window_pattern")
    kinds = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % every != 0)
    layers = [_sandwich(c, windowed if on else attention) for on in kinds]
    # The context after scaling, unlike in other families.
    return _decoder(c, layers, c.integer("max_position_embeddings"), names=names, norm=_norm(c, norm))


def _attention(c: ConfigReader, rope: Rope) -> Attention:
    bias = c.boolean("attention_bias")
    return replace(c.attention(rope), bias=bias, out_bias=bias)


def _scaled(c: ConfigReader, attention: Attention) -> Attention:
    """With Gemma 2's and 3's scale and soft cap of scores."""
    scale, cap = c.number("query_pre_attn_scalar") ** -0.5, c.number_or_none("attn_logit_softcapping")
    return replace(attention, score_scale=scale, soft_cap=cap)


def _mlp(c: ConfigReader) -> MLP:
    # Early checkpoints say gelu and mean its approximation by tanh.
    activation = c.activation("hidden_activation" if c.raw.get("hidden_activation") else "hidden_act")
    return MLP(c.integer("intermediate_size"), "gelu_tanh" if activation == "gelu" else activation)


def _norm(c: ConfigReader, name: str) -> Norm:
    return c.rms_norm(name, weight_offset=1.0)


def _sandwich(c: ConfigReader, attention: Attention) -> Layer:
    return Layer(
        attention,
        _mlp(c),
        attention_norm=_norm(c, "input_layernorm"),
        mlp_norm=_norm(c, "pre_feedforward_layernorm"),
        attention_post_norm=_norm(c, "post_attention_layernorm"),
        mlp_post_norm=_norm(c, "post_feedforward_layernorm"),
    )


def _decoder(c: ConfigReader, layers: list[Layer], max_position: int, **fields: Any) -> ModelConfig:
    fields = {"norm": _norm(c, "model.norm"), **fields}
    head = Head(soft_cap=c.number_or_none("final_logit_softcapping"))
    return c.decoder(layers, max_position, embedding_scale=math.sqrt(c.integer("hidden_size")), head=head, **fields)
