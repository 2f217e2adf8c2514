"""MiMo-V2-Flash, V2.5 and V2.5-Pro: windows with attention sinks and twice the KV heads in five of six layers, values narrower than keys,
a third of each head rotated, experts as DeepSeek-V3 chooses them. Source: arXiv:2601.02780.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Names, NextToken, Rope
from jaxllm.model_parts.next_token import FINAL_NORM
from jaxllm.models.config_reader import WINDOWED, ConfigReader
from jaxllm.models.deepseek_routing import sigmoid_moe

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "rms_norm_eps": 1e-5,
    "v_head_dim": 128,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "rope_theta": 5000000.0,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 0.334,
}
REQUIRED = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "attention_bias": False,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": 0,
}
"""The only values of keys that are computed."""
NAMES = Names(ignored=("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings."))
FUSED = "fused_qkv"
"""The layout of a tensor with queries, keys and values, for as many devices as layers without a window have KV heads."""
# Each of its modules takes the model's hidden states. Source: SGLang, for which MiMo's authors wrote them.
NEXT_TOKEN = replace(FINAL_NORM, layer="model.mtp.layers.{}", chains=False)


def read(c: ConfigReader) -> ModelConfig:
    c = _by_names_of_transformers(c.with_defaults(**DEFAULTS))
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    c.refuse_unless("attention_projection_layout", "split", FUSED)
    full_rope, max_position = c.rope_of("full_attention")
    local_rope, _ = c.rope_of("sliding_attention", {"rope_theta": c.number("swa_rope_theta")})
    windowed = c.layer_kinds(WINDOWED, lambda layer: layer != 0 and (layer + 1) % 6 != 0)
    attentions = {True: _windowed(c, local_rope), False: _attention(c, full_rope)}
    layers = [c.pre_norm_layer(attentions[on], c.mlp()) for on in windowed]
    # Released checkpoints have modules for multi-token prediction without saying so.
    fields = {"num_spare_layers": c.count("num_nextn_predict_layers", 1), "next_token": _next_token(c, local_rope)}
    return c.decoder(c.with_experts(layers, sigmoid_moe(c, "float32")), max_position, names=NAMES, **fields)


def _next_token(c: ConfigReader, rope: Rope) -> NextToken:
    """A dense layer with a window, whose second norm has another name."""
    layer = c.pre_norm_layer(_windowed(c, rope), c.mlp())
    return replace(NEXT_TOKEN, layers=(replace(layer, mlp_norm=c.rms_norm("pre_mlp_layernorm")),))


def _by_names_of_transformers(c: ConfigReader) -> ConfigReader:
    """A reader of the keys that transformers has for those of the hub."""
    raw, found = c.raw, {"routed_scaling_factor": c.raw.get("routed_scaling_factor") or 1.0}
    found["num_fused_qkv_runs"] = c.integer("num_key_value_heads")
    if raw.get("layernorm_epsilon") is not None:
        found["rms_norm_eps"] = raw["layernorm_epsilon"]
    if raw.get("sliding_window_size") is not None:  # without the token itself
        found["sliding_window"] = c.integer("sliding_window_size") + 1
    for theirs, ours, kinds in (
        ("hybrid_layer_pattern", "layer_types", {0: "full_attention", 1: "sliding_attention"}),
        ("moe_layer_freq", "mlp_layer_types", {0: "dense", 1: "sparse"}),
    ):
        if isinstance(given := raw.get(theirs), list) and ours not in raw:
            found[ours] = [kinds.get(kind, str(kind)) for kind in given]
    return c.with_values(**found)


def _attention(c: ConfigReader, rope: Rope) -> Attention:
    value_dim = c.integer("v_head_dim")
    if value_dim > c.head_dim:
        c.faults.append(f"v_head_dim is {value_dim}, must not be above head_dim, which is {c.head_dim}")
    scale = c.number("attention_value_scale", 1.0)
    attention = replace(c.attention(rope), value_dim=value_dim if value_dim != c.head_dim else None, value_scale=scale)
    if c.raw.get("attention_projection_layout") != FUSED:
        return attention
    runs = c.integer("num_fused_qkv_runs")
    if attention.num_kv_heads % runs or attention.num_heads % runs:
        c.faults.append(
            f"the {attention.num_heads} heads and {attention.num_kv_heads} KV heads of a layer must be multiples of "
            f"num_key_value_heads, which is {runs}, for attention_projection_layout {FUSED!r}"
        )
        runs = 1
    return replace(attention, qkv=("qkv_proj",), qkv_runs=runs)


def _windowed(c: ConfigReader, rope: Rope) -> Attention:
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        c.refuse_unless(f"swa_{name}", c.integer(name))
    kv_heads = c.integer("swa_num_key_value_heads", 2 * c.integer("num_key_value_heads"))
    return replace(
        _attention(c.with_values(num_key_value_heads=kv_heads), rope),
        window=c.integer("sliding_window"),
        sinks=c.boolean("add_swa_attention_sink_bias", True),
        sinks_name="attention_sink_bias",
    )
