"""MiniMax-M2: half of each head rotated, norms over all heads of q and k, experts chosen by sigmoids with a correction bias in every layer.
Source: the MiniMax-M2 release, 2025.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Names, Routing
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "max_position_embeddings": 196608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rope_theta": 5000000.0,
}
REQUIRED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""The only values of keys that checkpoints have."""


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    kinds = c.raw.get("attn_type_list") or []
    if kinds != [1] * len(kinds):
        c.faults.append(f"attn_type_list is {kinds!r}, supported: only 1, full attention")
    if (rotary_dim := c.integer_or_none("rotary_dim")) is not None:
        c = c.with_defaults(partial_rotary_factor=rotary_dim / c.head_dim)
    rope, max_position = c.positions()
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    routing = Routing(
        c.integer("num_local_experts"),
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=True,
        router_dtype="float32",
        correction_bias="e_score_correction_bias",
    )
    moe = c.moe(
        routing,
        c.integer("intermediate_size"),
        name="block_sparse_moe",
        gate_up=("experts.{}.w1", "experts.{}.w3"),
        down="experts.{}.w2",
    )
    layer = c.pre_norm_layer(replace(c.attention(rope), whole_norms=norms), moe)
    spare = range(c.num_layers, c.num_layers + c.count("num_mtp_modules", 0))
    names = Names(ignored=tuple(f"model.layers.{i}." for i in spare))
    return c.decoder([layer] * c.num_layers, max_position, names=names)
