"""Granite 4: Mamba-2 in most layers and attention in the others, or attention alone; an MLP in all layers, perhaps with experts.

Source: IBM's Granite 4.0 model cards, 2025.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Layer, Mamba2, MoE, Routing
from jaxllm.models import granite
from jaxllm.models.config_reader import ConfigReader

KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
"""Whether a layer has Mamba-2, by its entry in layer_types."""


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2)
    c.refuse_unless("hidden_act", "silu")
    c.refuse_unless("position_embedding_type", "rope", "nope")
    kinds = c.layer_kinds(KINDS, lambda layer: True)
    config = granite.read(c)
    shared = MLP(c.integer("shared_intermediate_size", 1024), **_names("shared_mlp"))
    mlp: MLP | MoE = shared
    if num_experts := c.count("num_local_experts"):
        routing = Routing(num_experts, c.integer("num_experts_per_tok"), "softmax_of_chosen", router="router.layer")
        mlp = c.moe(routing, c.integer("intermediate_size"), shared=shared, **_names("block_sparse_moe"))
    mamba = _mamba(c) if any(kinds) else None
    has_rope = c.raw.get("position_embedding_type") == "rope"

    def hybrid(layer: Layer, is_mamba: bool) -> Layer:
        assert isinstance(layer.attention, Attention)
        attention = layer.attention if has_rope else replace(layer.attention, rope=None)
        return replace(layer, attention=mamba if is_mamba and mamba is not None else attention, mlp=mlp)

    return replace(config, layers=tuple(map(hybrid, config.layers, kinds)))


def _names(module: str) -> dict[str, Any]:
    return {"name": module, "gate_up": ("input_linear",), "down": "output_linear"}


def _mamba(c: ConfigReader) -> Mamba2:
    num_heads = c.integer("mamba_n_heads", 128)
    if c.raw.get("mamba_d_head", "auto") == "auto":
        c = c.with_values(mamba_d_head=max(1, c.integer("mamba_expand", 2) * c.integer("hidden_size") // num_heads))
    return c.mamba2(
        num_heads,
        c.integer("mamba_n_groups", 1),
        c.integer("mamba_d_head"),
        c.integer("mamba_d_state", 256),
        c.integer("mamba_d_conv", 4),
        c.rms_norm("mamba.norm"),
        conv_bias=c.boolean("mamba_conv_bias", True),
        bias=c.boolean("mamba_proj_bias"),
    )
