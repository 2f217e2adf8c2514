"""Kimi Linear: most layers have linear attention in which each channel of a key decays at its own rate, the others attention over latents
without positions; the experts of DeepSeek-V3.

Source: arXiv:2510.26692.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import KimiDeltaAttention, MoE, Names
from jaxllm.models import deepseek
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import sigmoid_moe
from jaxllm.models.qwen3_next import KINDS

OF_HUB = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""DeepSeek-V3's keys, by those of the hub."""
DEFAULTS = {
    **deepseek.DEFAULTS,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
}
REQUIRED = {
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "routed_expert_hidden_size": None,
}
"""The only values of keys that are computed; Kimi K3 has others."""
REQUIRED_LINEAR = {"gate_lower_bound": None, "use_full_rank_gate": False}
"""Likewise of keys in `linear_attn_config`."""
UNQUANTIZED = ("self_attn.b_proj", "self_attn.f_a_proj", "self_attn.f_b_proj")
"""Exponentials of what these modules give decay the states."""
OF_TRANSFORMERS = (r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj(?:\.|$))", ".mlp.")
"""An alias: dense MLPs, which transformers saves by the name of mixtures."""
NAMES = Names(unquantized=UNQUANTIZED, aliases=(OF_TRANSFORMERS,))
MLP_NAME = "block_sparse_moe"


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**{**DEFAULTS, **{theirs: c.raw[ours] for ours, theirs in OF_HUB.items() if ours in c.raw}})
    for name, value in REQUIRED.items():
        c.refuse_unless(name, value)
    latent, linear = deepseek.attention(c, None), _linear_attention(c)
    layers = [c.pre_norm_layer(linear if is_linear else latent, c.mlp()) for is_linear in _kinds(c)]
    return c.decoder(c.with_experts(layers, _moe(c)), c.integer("max_position_embeddings"), names=NAMES)


def linear_attention(
    c: ConfigReader, num_heads: int, head_dim: int, kernel_size: int, norm: str, **fields: Any
) -> KimiDeltaAttention:
    """norm: the name of that of the heads' outputs. fields: of the part."""
    if kernel_size < 2:
        c.faults.append(f"the convolution of linear attention sees {kernel_size} token, must be at least 2")
    return KimiDeltaAttention(num_heads, head_dim, kernel_size, c.rms_norm(norm), **fields)


def _linear_attention(c: ConfigReader) -> KimiDeltaAttention:
    of_hub = c.within("linear_attn_config")
    for name, value in REQUIRED_LINEAR.items():
        of_hub.refuse_unless(name, value)
    num_heads = of_hub.integer("num_heads", c.integer("linear_num_heads", 32))
    head_dim = of_hub.integer("head_dim", c.integer("linear_head_dim", 128))
    kernel_size = of_hub.integer("short_conv_kernel_size", c.integer("linear_conv_kernel_dim", 4))
    return linear_attention(c, num_heads, head_dim, kernel_size, "self_attn.o_norm", narrow_dim=head_dim, nested_rates=True)


def _kinds(c: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer has linear attention: by layer_types, or by the hub's list of numbers from 1."""
    linear = c.within("linear_attn_config").raw.get("kda_layers")
    if c.raw.get("layer_types") is None and not isinstance(linear, list):
        c.faults.append("layer_types and kda_layers in linear_attn_config are missing: which layers have linear attention?")
    numbers = linear if isinstance(linear, list) else []
    kinds = c.layer_kinds(KINDS, lambda layer: layer + 1 in numbers)
    if all(kinds):
        c.faults.append("all layers have linear attention, supported: with at least one of full attention")
    return kinds


def _moe(c: ConfigReader) -> MoE:
    """The experts of DeepSeek-V3, with other names."""
    moe = sigmoid_moe(c)
    shared = None if moe.shared is None else replace(moe.shared, name=f"{MLP_NAME}.shared_experts")
    return replace(moe, name=MLP_NAME, shared=shared, gate_up=("experts.{}.w1", "experts.{}.w3"), down="experts.{}.w2")
