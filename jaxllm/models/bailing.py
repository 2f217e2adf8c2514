"""Ling 2 and Ring 2, and Sarvam's mixture: each head of q and k is normalised before rotation of a part of it, the experts of DeepSeek-V3.
Ling 2.5 and 2.6, and such Rings: most layers have lightning attention, the others attention over latents.
Ling 3: most layers have the linear attention of Kimi Linear, the others attention over latents whose heads have gates.

Sources: arXiv:2510.22115, the Ring 2.5 and Ling 3 releases.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import KimiDeltaAttention, Layer, LightningAttention, MoE, Names, OutputGate, Rope
from jaxllm.model_parts.next_token import FINAL_NORM
from jaxllm.models import deepseek, kimi_linear
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import grouped_moe
from jaxllm.models.qwen3_next import KINDS

NAMES = Names(embedding="model.word_embeddings")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}
DEFAULTS_SARVAM = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_theta": 8000000.0,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1024,
}
DEFAULTS_V2_5 = {
    **DEFAULTS,
    **deepseek.DEFAULTS,
    "max_position_embeddings": 32768,
    "q_lora_rank": None,
    "layer_group_size": 5,
    "group_norm_size": 4,
    "router_dtype": "fp32",
}
REQUIRED_V2_5 = {
    "linear_silu": False,
    "rope_interleave": True,
    "topk_method": "noaux_tc",
    "full_attention_type": "mla",
    "use_qkv_bias": False,
}
OF_TRANSFORMERS_V3 = {**kimi_linear.OF_HUB, "num_experts": "num_experts", "num_shared_experts": "num_shared_experts"}
DEFAULTS_V3 = {
    **DEFAULTS,
    **deepseek.DEFAULTS,
    "max_position_embeddings": 262144,
    "q_lora_rank": None,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
    "layer_group_size": 6,
    "rope_theta": 6000000.0,
    "router_dtype": "fp32",
}
REQUIRED_V3 = {
    "rope_interleave": True,
    "topk_method": "noaux_tc",
    "use_qkv_bias": False,
    "use_mla_nope": False,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "scale_router_input": False,
    "up_proj_norm": False,
    "use_nGPT": False,
    "value_norm": False,
    "pregate_inference": False,
}
GATES_V3 = {"head_wise": True, "element_wise": False}
"""Whether all values of a head have the same gate, by `gated_attention_proj_granularity_type`."""
UNQUANTIZED_V3 = ("attention.b_proj", "attention.f_proj")
"""Exponentials of what these modules give decay the states."""
REQUIRED = {
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "use_bias": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}
"""The only values of keys that are computed."""
ROUTER_DTYPES = {"fp32": "float32", "bf16": None}
"""As `Routing` has it."""


def read(c: ConfigReader) -> ModelConfig:
    """Ling 2 and Ring 2."""
    c = _by_names_of_transformers(c.with_defaults(**DEFAULTS))
    rope, max_position = c.positions()
    attention = replace(
        c.attention(rope),
        bias=c.boolean("attention_bias"),
        head_norms=(c.rms_norm("attention.query_layernorm"), c.rms_norm("attention.key_layernorm")),
        name="attention",
        qkv=("query_key_value",),
        out="dense",
    )
    layers = [c.pre_norm_layer(attention, c.mlp())] * c.num_layers
    return c.decoder(c.with_experts(layers, _moe(c)), max_position, names=NAMES, next_token=FINAL_NORM)


def _by_names_of_transformers(c: ConfigReader) -> ConfigReader:
    """A reader of the keys that transformers has for those of the hub."""
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    of_hub = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
    return c.with_values(**{ours: c.raw[theirs] for theirs, ours in of_hub.items() if theirs in c.raw})


def _moe(c: ConfigReader) -> MoE:
    c.refuse_unless("router_dtype", *ROUTER_DTYPES)
    c.refuse_unless("moe_shared_expert_intermediate_size", c.integer("moe_intermediate_size"))
    return grouped_moe(c, "sigmoid", "gate.expert_bias", ROUTER_DTYPES.get(str(c.raw.get("router_dtype"))))


def read_sarvam(c: ConfigReader) -> ModelConfig:
    return read(c.with_defaults(**DEFAULTS_SARVAM))


def read_v2_5(c: ConfigReader) -> ModelConfig:
    """Ling 2.5 and 2.6, and Ring 2.5 and 2.6."""
    c = _by_names_of_transformers(c.with_defaults(**DEFAULTS_V2_5))
    for name, value in REQUIRED_V2_5.items():
        c.refuse_unless(name, value)
    rope, max_position = c.positions()
    # A part of the heads of linear attention turns, and all rotated values of attention over latents.
    latent_rope = replace(rope, rotary_dim=None, interleaved=True)
    latent = deepseek.attention(c, latent_rope, name="attention", out="dense", eps=c.number("rms_norm_eps"))
    mixers = (latent if _is_full(c, layer) else _lightning(c, rope, layer) for layer in range(c.num_layers))
    layers = [c.pre_norm_layer(mixer, c.mlp()) for mixer in mixers]
    return c.decoder(c.with_experts(layers, _moe(c)), max_position, names=NAMES, next_token=FINAL_NORM)


def read_v3(c: ConfigReader) -> ModelConfig:
    """Ling 3."""
    given = {theirs: c.raw[ours] for ours, theirs in OF_TRANSFORMERS_V3.items() if ours in c.raw}
    c = _by_names_of_transformers(c.with_defaults(**{**DEFAULTS_V3, **given}))
    for name, value in REQUIRED_V3.items():
        c.refuse_unless(name, value)
    # All rotated values of attention over latents turn, whatever partial_rotary_factor is.
    rope, max_position = c.positions()
    rope = replace(rope, rotary_dim=None, interleaved=True)
    granularity = c.raw.get("gated_attention_proj_granularity_type", "head_wise")
    c.refuse_unless("gated_attention_proj_granularity_type", *GATES_V3)
    gate = OutputGate("g_proj", "sigmoid", by_head=GATES_V3.get(str(granularity), True))
    latent = deepseek.attention(c, rope, name="attention", out="dense", eps=c.number("rms_norm_eps"), gate=gate)
    kinds = c.layer_kinds(KINDS, lambda layer: not _is_full(c, layer))
    linear = _kimi_delta(c)
    layers = [c.pre_norm_layer(linear if is_linear else latent, c.mlp()) for is_linear in kinds]
    names = replace(NAMES, unquantized=UNQUANTIZED_V3, aliases=(_outputs_of_transformers(kinds),))
    layers = _with_limits(c, c.with_experts(layers, _moe(c)))
    return c.decoder(layers, max_position, names=names, next_token=FINAL_NORM)


def _outputs_of_transformers(are_linear: Sequence[bool]) -> tuple[str, str]:
    """An alias: the output of linear attention, which transformers saves by the name of the other one's."""
    layers = "|".join(str(layer) for layer, is_linear in enumerate(are_linear) if is_linear)
    return rf"^(model\.layers\.(?:{layers})\.attention)\.dense(?=\.|$)", r"\1.o_proj"


def _with_limits(c: ConfigReader, layers: list[Layer]) -> list[Layer]:
    """With the limits that the activations of experts have in some layers, as vLLM computes them. transformers does not."""
    limits = zip(c.limits("expert_swiglu_limit_list"), c.limits("share_expert_swiglu_limit_list"), strict=True)
    found = []
    for layer, (limit, shared_limit) in zip(layers, limits, strict=True):
        if isinstance(layer.mlp, MoE):
            shared = layer.mlp.shared and replace(layer.mlp.shared, clamp=shared_limit)
            layer = replace(layer, mlp=replace(layer.mlp, clamp=limit, shared=shared))
        found.append(layer)
    return found


def _is_full(c: ConfigReader, layer: int) -> bool:
    """Whether a layer has attention over latents: the last of each group, and those behind the last whole group."""
    every = c.integer("layer_group_size")
    return (layer + 1) % every == 0 or layer >= c.num_layers // every * every


def _kimi_delta(c: ConfigReader) -> KimiDeltaAttention:
    bound = c.raw.get("kda_lower_bound", -5.0)
    if not isinstance(bound, (int, float)) or not -1e4 < bound < 0:
        c.faults.append(f"kda_lower_bound is {bound!r}, must be a negative number")
        bound = -5.0
    return kimi_linear.linear_attention(
        c,
        c.integer("num_attention_heads"),
        c.integer("linear_head_dim", c.head_dim),
        c.integer("short_conv_kernel_size", 4),
        "attention.o_norm",
        lower_bound=float(bound) if c.boolean("kda_safe_gate", True) else None,
        name="attention",
    )


def _lightning(c: ConfigReader, rope: Rope, layer: int) -> LightningAttention:
    num_heads, num_groups = c.integer("num_attention_heads"), c.integer("group_norm_size")
    if num_heads % num_groups:
        c.faults.append(f"group_norm_size is {num_groups}, must divide num_attention_heads, which is {num_heads}")
        num_groups = 1
    if c.head_dim % 2:
        c.faults.append(f"head_dim is {c.head_dim}, must be even")
    return LightningAttention(
        num_heads,
        c.head_dim,
        rope,
        decay=1 - (layer - 1) / max(1, c.num_layers - 1) + 1e-5,
        norm=c.rms_norm("attention.g_norm"),
        num_norm_groups=num_groups,
        head_norms=(c.rms_norm("attention.query_layernorm"), c.rms_norm("attention.key_layernorm")),
    )
