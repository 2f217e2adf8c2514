"""Step 3.5 and 3.7 (text): layers with a window have other numbers of heads and another rope than those without, a gate for each head's
output; experts chosen by sigmoids with a correction bias, in addition to a shared one, with limits of their values in the last layers.

Source: StepFun's Step 3.5 Flash release, 2026.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Layer, MoE, OutputGate, Rope, Routing
from jaxllm.models.config_reader import SPARSE, WINDOWED, ConfigReader

DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "sliding_window": 512,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
}
OTHER_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""Keys of the hub, by what transformers calls them."""
REQUIRED: dict[str, Any] = {
    "use_head_wise_attn_gate": True,
    "gating": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "attention_bias": False,
    "mlp_bias": False,
    "sink": False,
    "moe_router_activation": "sigmoid",
    "use_moe": True,
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
    "use_bidirectional_attention": False,
}
"""The only values of keys that are computed."""
PER_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta", "partial_rotary_factors")
"""Lists that may go on with the modules for multi-token prediction."""
KIND = {True: "sliding_attention", False: "full_attention"}


def read(c: ConfigReader) -> ModelConfig:
    """The text model of a checkpoint with or without a vision encoder."""
    c, names, norm = c.text_part("model", "lm_head")
    c = _by_names_of_transformers(c)
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    if c.raw.get("use_rope_layers"):
        c.refuse_unless("use_rope_layers", [1] * c.num_layers)
    if c.raw.get("query_pre_attn_scalar") is not None:
        c.refuse_unless("query_pre_attn_scalar", c.head_dim)
    windowed = c.layer_kinds(WINDOWED, lambda layer: False)
    ropes = {on: _rope(c, windowed, on) for on in dict.fromkeys(windowed)}
    attentions = {on: _attention(c, rope, on) for on, (rope, _) in ropes.items()}
    limits, shared_limits = c.limits("swiglu_limits"), c.limits("swiglu_limits_shared")
    layers = []
    for i, is_sparse in enumerate(_sparse_layers(c)):
        mlp = _moe(c, limits[i], shared_limits[i]) if is_sparse else replace(c.mlp(), clamp=shared_limits[i])
        layers.append(_with_offsets(c, attentions[windowed[i]], mlp))
    longest = max(max_position for _, max_position in ropes.values())
    return c.decoder(layers, longest, names=names, norm=c.rms_norm(norm, weight_offset=1.0))


def _by_names_of_transformers(c: ConfigReader) -> ConfigReader:
    """A reader of the keys that transformers has for those of the hub, without what lists say of later modules."""
    raw = {OTHER_NAMES.get(name, name): value for name, value in c.raw.items()}
    count = raw.get("num_hidden_layers", DEFAULTS["num_hidden_layers"])
    for name in PER_LAYER:
        if isinstance(raw.get(name), list) and type(count) is int:
            raw[name] = raw[name][:count]
    return c.with_values(**raw).with_defaults(**DEFAULTS)


def _rope(c: ConfigReader, windowed: tuple[bool, ...], has_window: bool) -> tuple[Rope, int]:
    """The rope of the layers of a kind, which are alike, and the longest sequence."""
    first = windowed.index(has_window)
    given = {"rope_theta": c.raw.get("rope_theta"), "partial_rotary_factor": c.raw.get("partial_rotary_factors")}
    given = {name: value[first] if isinstance(value, list) else value for name, value in given.items()}
    scaling, kinds = c.raw.get("rope_scaling"), c.raw.get("yarn_only_types") or [KIND[False]]
    if isinstance(scaling, dict) and KIND[has_window] in kinds:
        given |= scaling
    # The lists are no values of all layers.
    apart = c.with_values(rope_scaling=None, rope_theta=None, partial_rotary_factor=None)
    return apart.rope_of(KIND[has_window], {name: value for name, value in given.items() if value is not None})


def _attention(c: ConfigReader, rope: Rope, has_window: bool) -> Attention:
    other = c.within("attention_other_setting") if has_window else c.with_values()
    heads = c.integer("num_attention_heads")
    if has_window:
        other.refuse_unless("attention_type", KIND[True])
        other.refuse_unless("head_dim", c.head_dim)
        heads = other.integer("num_attention_heads", c.integer("num_sliding_attention_heads", heads))
    kv_heads = other.integer("num_attention_groups", c.integer("num_key_value_heads"))
    norms = (c.rms_norm("self_attn.q_norm", weight_offset=1.0), c.rms_norm("self_attn.k_norm", weight_offset=1.0))
    return replace(
        c.with_values(num_attention_heads=heads, num_key_value_heads=kv_heads).attention(rope),
        head_norms=norms,
        window=c.integer("sliding_window") if has_window else None,
        gate=OutputGate("g_proj", "sigmoid", by_head=True),
    )


def _with_offsets(c: ConfigReader, attention: Attention, mlp: MLP | MoE) -> Layer:
    layer = c.pre_norm_layer(attention, mlp)
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    norms = (replace(norm, weight_offset=1.0) for norm in (layer.attention_norm, layer.mlp_norm))
    return replace(layer, attention_norm=next(norms), mlp_norm=next(norms))


def _moe(c: ConfigReader, clamp: float | None, shared_clamp: float | None) -> MoE:
    routing = Routing(
        c.integer("n_routed_experts"),
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=True,
        scale=c.number("moe_router_scaling_factor"),
        router_dtype="float32",
        correction_bias="router_bias",
    )
    shared = MLP(c.integer("share_expert_dim"), c.activation(), clamp=shared_clamp, name="share_expert")
    moe = c.moe(routing, c.integer("moe_intermediate_size"), shared=shared, name="moe")
    return replace(moe, clamp=clamp, gate_up=("gate_proj", "up_proj"), down="down_proj")


def _sparse_layers(c: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer has experts: by mlp_layer_types, else by moe_layers_enum, else all behind the first three."""
    given = c.raw.get("moe_layers_enum")
    places = given.split(",") if isinstance(given, str) else given
    try:
        sparse = set(range(3, c.num_layers)) if places is None else {int(place) for place in places}
    except (TypeError, ValueError):
        c.faults.append(f"moe_layers_enum is {given!r}, must be numbers of layers, separated by commas")
        sparse = set()
    return c.layer_kinds(SPARSE, lambda layer: layer in sparse, "mlp_layer_types")
