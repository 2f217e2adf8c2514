"""Mistral: Llama with a sliding window over the keys, the same in every layer. Ministral 3: instead of a window, queries that grow with
their positions. Mistral 4 and Mistral Large 3: such queries, attention over latents and experts as DeepSeek-V3 has them, chosen by a
softmax; these two may be in Mistral's own form (params.json, consolidated*.safetensors, tekken.json).

Sources: arXiv:2310.06825, the Ministral 3 and Mistral Large 3 releases.
"""

import re
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Names, QueryScale
from jaxllm.models import deepseek
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import grouped_moe

YARN = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
YARN_4 = {**YARN, "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
DEFAULTS_4 = {
    **deepseek.DEFAULTS,
    "max_position_embeddings": 1048576,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
}
DEFAULTS_LARGE_3 = {
    "max_position_embeddings": 128000,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
REQUIRED_LARGE_3 = {"moe_layer_freq": 1, "n_group": 1, "renorm_strategy": "WEIGHTS", "use_load_balancing_bias": False}
"""The only values of keys that are computed."""
_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_OF_LAYERS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward": "mlp",
    "gate": "mlp.gate",
    "shared_experts": "mlp.shared_experts",
    "experts": "mlp.experts",
}
_OF_MLPS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = r"^(model\.layers\.\d+)"
NAMES_LARGE_3 = Names(
    is_part=True,  # the checkpoint has a vision encoder too
    aliases=(
        *((rf"^{name}(?=\.|$)", ours) for name, ours in _OUTSIDE.items()),
        # Scales of caches in 8 bits, which have none here: left out as what is not of the text model is.
        (r"^(?=layers\.\d+\.attention\.\w+_fake_quantizer\.)", "cache_scales."),
        (r"^layers\.", "model.layers."),
        *((rf"{_LAYER}\.{re.escape(name)}(?=\.|$)", rf"\1.{ours}") for name, ours in _OF_LAYERS.items()),
        *((rf"{_LAYER}\.mlp((?:\.\w+)*)\.{name}(?=\.|$)", rf"\1.mlp\2.{ours}") for name, ours in _OF_MLPS.items()),
        (r"\.qscale_weight$", ".weight_scale"),
        (r"\.qscale_act$", ".input_scale"),
    ),
)


def read(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    rope, max_position = c.positions()
    window = c.integer_or_none("sliding_window")
    attention = replace(c.attention(rope), window=window)
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position, **fields)


def read_ministral3(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    if not c.raw.get("rope_scaling") and not c.raw.get("rope_parameters"):
        c = c.with_values(rope_parameters=YARN)
    rope, max_position = c.positions()
    attention = replace(c.attention(rope), window=c.integer_or_none("sliding_window"), query_scale=_query_scale(c))
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position, **fields)


def read_mistral4(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(**DEFAULTS_4)
    c.refuse_unless("scoring_func", "softmax")
    plain, rotated = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
    c = c.with_values(head_dim=plain + rotated)
    if not c.raw.get("rope_scaling") and not c.raw.get("rope_parameters"):
        c = c.with_values(rope_parameters=YARN_4)
    is_interleaved = c.boolean("rope_interleave", True)
    moe = grouped_moe(c, "softmax", gate_up=("experts.gate_up_proj",), down="experts.down_proj", ending="")
    return deepseek.decoder(c, c.mlp(), moe, interleaved=is_interleaved, query_scale=_query_scale(c), **fields)


def read_large_3(c: ConfigReader) -> ModelConfig:
    """Mistral Large 3. Its config is what `mistral_params.as_config` makes of params.json."""
    c = c.with_defaults(**DEFAULTS_LARGE_3)
    for name, value in REQUIRED_LARGE_3.items():
        c.refuse_unless(name, value)
    c = c.with_values(head_dim=c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim"))
    rope, max_position = c.positions(interleaved=True)
    scaling = c.within("llama_4_scaling")
    grows = (
        QueryScale(scaling.number("beta"), scaling.integer("original_max_position_embeddings"), offset=0)
        if scaling.raw
        else None
    )
    attention = deepseek.attention(c, rope, eps=c.number("rms_norm_eps"), query_scale=grows)
    layers = c.with_experts([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, grouped_moe(c, "softmax"))
    return c.decoder(layers, max_position, names=NAMES_LARGE_3)


def _query_scale(c: ConfigReader) -> QueryScale | None:
    given = c.within("rope_scaling" if c.raw.get("rope_scaling") else "rope_parameters")
    rate = given.number_or_none("llama_4_scaling_beta")
    return None if rate is None else QueryScale(rate, given.integer("original_max_position_embeddings"), offset=0)
