"""Gemma 4 (text): layers with a window and without have heads of other widths and numbers, and other ropes; the last layers may read the
keys of earlier ones, layers may have a part of a second embedding, and experts in addition to an MLP. Heads of 512 values have a
kernel of their own. Source: the Gemma 4 release, 2026.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Gemma4Layer, Head, Layer, MoE, PerLayerEmbedding, Routing
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
OF_HEADS = ("head_dim", "num_key_value_heads")
"""Values that per_layer_config may give a layer."""
UNIFIED = {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
"""Other defaults of the models without encoders."""


def read(c: ConfigReader) -> ModelConfig:
    """E2B, E4B, 26B-A4B and 31B."""
    return _read(c, {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144})


def read_unified(c: ConfigReader) -> ModelConfig:
    """Models that take images and audio without an encoder."""
    return _read(c, UNIFIED)


def _read(c: ConfigReader, defaults: Mapping[str, Any]) -> ModelConfig:
    c, names, norm = c.text_part("model.language_model", "lm_head")
    c = c.with_defaults(**{**DEFAULTS, **defaults})
    c = c.with_values(hidden_act=c.raw["hidden_activation"], rope_parameters=c.raw.get("rope_parameters") or ROPE)
    # With "vision", tokens of an image see each other: not those of texts.
    c.refuse_unless("use_bidirectional_attention", False, "vision")
    windowed = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % 6 != 0)
    windowed = (*windowed[:-1], False)  # whatever the config says of the last layer
    num_shared = c.count("num_kv_shared_layers", 0)
    sources = _sources(c, windowed, num_shared)
    attentions = [_attention(c, i, on, source) for i, (on, source) in enumerate(zip(windowed, sources, strict=True))]
    wide = c.boolean("use_double_wide_mlp")
    mlp = c.mlp()
    per_layer, moe = _per_layer(c), _moe(c)
    layers: list[Layer] = []
    for attention, source in zip(attentions, sources, strict=True):
        own = replace(mlp, width=2 * mlp.width) if wide and source is not None else mlp
        layers.append(_layer(c, attention, own, moe, per_layer))
    unused = [i for i, source in enumerate(sources) if source is not None]
    tensors = ("k_proj.", "v_proj.", "k_norm.")
    ignored = tuple(f"{names.layer.format(i)}.self_attn.{tensor}" for i in unused for tensor in tensors)
    return c.decoder(
        layers,
        c.integer("max_position_embeddings"),
        norm=c.rms_norm(norm),
        names=replace(names, ignored=ignored),
        embedding_scale=math.sqrt(c.integer("hidden_size")),
        head=Head(soft_cap=c.number_or_none("final_logit_softcapping")),
        model_class="jaxllm.layers.gemma4:Gemma4LM",
    )


def _sources(c: ConfigReader, windowed: Sequence[bool], num_shared: int) -> list[int | None]:
    """For each layer the one whose keys it reads: of the last `num_shared`, the last before these of the same kind."""
    first = len(windowed) - num_shared
    last = {on: i for i, on in enumerate(windowed[: max(first, 0)])}
    if missing := set(windowed[max(first, 0) :]) - last.keys():
        kinds = " and ".join(kind for kind, on in WINDOWED.items() if on in missing)
        c.faults.append(
            f"num_kv_shared_layers is {num_shared}, but none of the layers before these {len(windowed) - max(first, 0)} is of "
            f"{kinds}, whose keys they read"
        )
    return [None if i < first or on in missing else last[on] for i, on in enumerate(windowed)]


def _attention(c: ConfigReader, layer: int, has_window: bool, source: int | None) -> Attention:
    values_are_keys = c.boolean("attention_k_eq_v") and not has_window
    c = _of_layer(c, layer, has_window, values_are_keys)
    kind = "sliding_attention" if has_window else "full_attention"
    rope, _ = c.rope_of(kind)
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    bias = c.boolean("attention_bias")
    return replace(
        c.attention(rope),
        bias=bias,
        out_bias=bias,
        window=c.integer("sliding_window") if has_window else None,
        head_norms=(c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm")),
        value_norm=None if source is not None else c.rms_norm("self_attn.v_norm", weighted=False),
        values_are_keys=values_are_keys and source is None,
        reads_layer=source,
        qkv=qkv[:1] if source is not None else qkv[:2] if values_are_keys else qkv,
        score_scale=1.0,
    )


def _of_layer(c: ConfigReader, layer: int, has_window: bool, values_are_keys: bool) -> ConfigReader:
    """The reader with a layer's heads: of per_layer_config, as transformers saves them, or of the keys of published checkpoints."""
    if c.raw.get("per_layer_config"):
        own = c.within("per_layer_config").within(str(layer)).raw
        if others := [name for name, value in own.items() if name not in OF_HEADS and value != c.raw.get(name)]:
            c.faults.append(
                f"per_layer_config gives layer {layer} its own {', '.join(others)}, supported: {' and '.join(OF_HEADS)}"
            )
        return c.with_values(**{name: own[name] for name in OF_HEADS if name in own})
    if has_window:
        return c
    num_heads = c.integer_or_none("num_global_key_value_heads") if values_are_keys else None
    heads = {} if num_heads is None else {"num_key_value_heads": num_heads}
    return c.with_values(head_dim=c.integer("global_head_dim"), **heads)


def _layer(
    c: ConfigReader, attention: Attention, mlp: MLP, moe: MoE | None, per_layer: PerLayerEmbedding | None
) -> Gemma4Layer:
    norms: dict[str, Any] = {
        "attention_norm": c.rms_norm("input_layernorm"),
        "mlp_norm": c.rms_norm("pre_feedforward_layernorm"),
        "attention_post_norm": c.rms_norm("post_attention_layernorm"),
        "mlp_post_norm": c.rms_norm("post_feedforward_layernorm"),
    }
    if moe is None:
        return Gemma4Layer(attention, mlp, per_layer=per_layer, **norms)
    norms |= {
        "beside_post_norm": c.rms_norm("post_feedforward_layernorm_1"),
        "experts_norm": c.rms_norm("pre_feedforward_layernorm_2"),
        "experts_post_norm": c.rms_norm("post_feedforward_layernorm_2"),
        "router_norm": c.rms_norm("router.norm", weighted=False),
    }
    return Gemma4Layer(attention, moe, per_layer=per_layer, beside=mlp, **norms)


def _per_layer(c: ConfigReader) -> PerLayerEmbedding | None:
    width = c.count("hidden_size_per_layer_input")
    if not width:
        return None
    c.refuse_unless("vocab_size_per_layer_input", c.raw.get("vocab_size"))
    norms = c.rms_norm("post_per_layer_input_norm"), c.rms_norm("per_layer_projection_norm")
    return PerLayerEmbedding(width, c.activation(), norms[0], c.num_layers, norms[1])


def _moe(c: ConfigReader) -> MoE | None:
    if not c.boolean("enable_moe_block"):
        return None
    routing = Routing(
        c.integer("num_experts"),
        c.integer("top_k_experts"),
        renormalize=True,
        router="router.proj",
        expert_scale="router.per_expert_scale",
    )
    names: dict[str, Any] = {"name": "", "gate_up": ("experts.gate_up_proj",), "down": "experts.down_proj", "ending": ""}
    return c.moe(routing, c.integer("moe_intermediate_size"), **names)
