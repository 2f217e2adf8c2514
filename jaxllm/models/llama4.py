"""Llama 4 (text): each token has one expert; every fourth layer has no positions, the others attend within chunks. By default a sequence
is at most one chunk long (`attention_chunk_size`, 8192 tokens); a greater `--max-model-len` makes it several.

Source: Meta's Llama 4 model card, 2025. Within the first chunk, attention within chunks is attention to all tokens before.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, MoE, QueryScale, Routing
from jaxllm.models.config_reader import ConfigReader

DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
CHUNKED = {"chunked_attention": True, "full_attention": False}
"""Whether a layer attends within chunks, by its entry in layer_types."""


def read(c: ConfigReader) -> ModelConfig:
    """The text model of a checkpoint with or without a vision encoder."""
    c, names, norm = c.text_part()
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions(interleaved=True)
    bias = c.boolean("attention_bias")
    turned = replace(c.attention(rope), bias=bias, out_bias=bias)
    # The norms have no weight and so do not depend on the rotation, which they follow in the original.
    norms = (c.rms_norm("self_attn.q_norm", weighted=False), c.rms_norm("self_attn.k_norm", weighted=False))
    attentions = {True: replace(turned, head_norms=norms if c.boolean("use_qk_norm") else None), False: _unturned(c, turned)}
    has_rope = c.layers_with_rope()
    kinds = c.layer_kinds(CHUNKED, lambda layer: has_rope[layer])
    dense = replace(c.mlp(name="feed_forward"), width=c.integer("intermediate_size_mlp"))
    mlps: dict[bool, MLP | MoE] = {True: _moe(c), False: dense}
    sparse = _sparse_layers(c)
    chunk = c.integer_or_none("attention_chunk_size") if any(kinds) else None
    longest: int | None = None
    if chunk is not None and chunk < max_position and (c.max_model_len is None or c.max_model_len <= chunk):
        max_position, longest, chunk = chunk, max_position, None
    layers = []
    for i, (turns, is_chunked) in enumerate(zip(has_rope, kinds, strict=True)):
        attention = replace(attentions[turns], chunk=chunk if is_chunked else None)
        layers.append(c.pre_norm_layer(attention, mlps[i in sparse]))
    return c.decoder(layers, max_position, names=names, norm=c.rms_norm(norm), chosen_max_position=longest)


def _unturned(c: ConfigReader, attention: Attention) -> Attention:
    """Attention without positions, whose queries may grow with theirs."""
    scale = QueryScale(c.number("attn_scale"), c.integer("floor_scale"))
    return replace(attention, rope=None, query_scale=scale if c.raw["attn_temperature_tuning"] else None)


def _moe(c: ConfigReader) -> MoE:
    c.refuse_unless("num_experts_per_tok", 1)
    routing = Routing(c.integer("num_local_experts"), 1, "sigmoid", router="router")
    return c.moe(
        routing,
        c.integer("intermediate_size"),
        name="feed_forward",
        gate_up=("experts.gate_up_proj",),
        down="experts.down_proj",
        transposed=True,
        weighs_input=True,
        shared=c.mlp(name="feed_forward.shared_expert"),
    )


def _sparse_layers(c: ConfigReader) -> list[int]:
    every = c.integer("interleave_moe_layer_step")
    given = c.raw.get("moe_layers")
    if given is None:
        return list(range(every - 1, c.num_layers, every))
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        c.faults.append(f"moe_layers is {given!r}, must be a list of layers")
        return []
    return given
