"""Hunyuan, dense and A13B: Llama in which each head of q and k is normalised behind the rotation; A13B with experts in addition to a
shared one. Source: Tencent's Hunyuan releases, 2025.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, MoE, Rope, Routing
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
REQUIRED = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False, "norm_topk_prob": True, "moe_layer_num_skipped": 0}
"""The only values of keys that are computed."""


def read(c: ConfigReader) -> ModelConfig:
    return _model(c.with_defaults(**DEFAULTS), c.mlp())


def read_moe(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    names = ("moe_topk", "num_shared_expert", "moe_intermediate_size")
    c = c.with_values(**{name: _of_all_layers(c, name) for name in names})
    num_experts, top_k = c.integer("num_experts"), c.integer("moe_topk", 1)
    routing = Routing(num_experts, top_k, renormalize=True, router="gate.wg", router_dtype="float32")
    c.refuse_unless("num_shared_expert", 1)
    width = c.integer("intermediate_size")
    c.refuse_unless("moe_intermediate_size", width)
    return _model(c, c.moe(routing, width, shared=c.mlp(name="mlp.shared_mlp")))


def _model(c: ConfigReader, mlp: MLP | MoE) -> ModelConfig:
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    rope, max_position = _positions(c)
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.query_layernorm"), c.rms_norm("self_attn.key_layernorm"))
    attention = replace(c.attention(rope), bias=bias, out_bias=bias, head_norms=norms, rotates_first=True)
    return c.decoder([c.pre_norm_layer(attention, mlp)] * c.num_layers, max_position)


def _positions(c: ConfigReader) -> tuple[Rope, int]:
    """Rope and the longest sequence. With alpha, a dynamic rope has one base for all lengths."""
    given = c.within("rope_scaling" if c.raw.get("rope_scaling") else "rope_parameters")
    if given.raw.get("rope_type", given.raw.get("type")) != "dynamic" or not given.raw.get("alpha"):
        return c.positions()
    theta = given.number("rope_theta", c.number("rope_theta", 10000.0))
    base = theta * given.number("alpha") ** (c.head_dim / (c.head_dim - 2))
    return c.rope({"rope_theta": base}, c.integer("max_position_embeddings"))


def _of_all_layers(c: ConfigReader, name: str) -> Any:
    """The value of a key that may be a list with the same value for each layer."""
    value = c.raw.get(name)
    if not isinstance(value, list):
        return value
    if any(other != value[0] for other in value):
        c.faults.append(f"{name} is {value!r}, supported: one value for all layers")
    return value[0] if value else None
