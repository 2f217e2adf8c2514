"""Families for tests that transformers does not have, as models of it and what checkpoints of the hub have for their tensors: Ling 2.5, its
DeepSeek-V3 with lightning attention in some layers; PLaMo 3, its Gemma 3 with other first values of the weights of norms; and Mistral
Large 3, its Mistral 4 in another form."""

import re
from typing import Any

import numpy as np
from transformers import DeepseekV3Config, Gemma3TextConfig, Mistral4Config

Tensors = dict[str, Any]


class LingConfig(DeepseekV3Config):
    model_type = "bailing_moe_v2_5"

    layer_group_size: int = 3
    group_norm_size: int = 4
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    head_dim: int = 16

    def is_full(self, layer: int) -> bool:
        """Whether a layer has attention over latents."""
        size = self.layer_group_size
        return (layer + 1) % size == 0 or layer >= self.num_hidden_layers // size * size


class PlamoConfig(Gemma3TextConfig):
    """Read by its own reader, which knows no other names for what Gemma 3 calls otherwise."""

    model_type = "plamo3"

    hidden_act: str = "silu"


class MistralLarge3Config(Mistral4Config):
    """Of Mistral 4, whose model it is."""

    model_type = "mistral_large_3"


PLAMO_NAMES = {
    "self_attn.": "mixer.",
    "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "post_mixer_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "model.layers.": "model.layers.layers.",
}
JOINED = {
    "mixer.qkv_proj": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def published_plamo(tensors: Tensors) -> Tensors:
    """The tensors of a Gemma 3 as a checkpoint of PLaMo 3 has them."""
    found: Tensors = {}
    for name, value in tensors.items():
        name = re.sub("|".join(map(re.escape, PLAMO_NAMES)), lambda part: PLAMO_NAMES[part[0]], name)
        offset = 0.8 if "post_mixer" in name else 1 - 5**-1.5 if "post_mlp" in name else 0.0
        scale = value.shape[1] ** 0.5 if name == "model.embed_tokens.weight" else 1.0
        found[name] = ((value.astype(np.float32) + offset) * scale).astype(np.float32)
    for layer in sorted({name.partition(".mixer.")[0] for name in found if ".mixer.q_proj" in name}):
        for joined, parts in JOINED.items():
            found[f"{layer}.{joined}.weight"] = np.concatenate([found.pop(f"{layer}.{part}.weight") for part in parts])
    return found


def published_kimi(tensors: Tensors) -> Tensors:
    """The tensors of a Kimi Linear as the hub has them: transformers saves dense MLPs by the name of mixtures."""
    return {re.sub(r"block_sparse_moe\.(?=\w+_proj\.)", "mlp.", name): value for name, value in tensors.items()}


def published_ling_3(tensors: Tensors) -> Tensors:
    """The tensors of a Ling 3 as the hub has them: transformers saves the output of linear attention by the name of the other one's."""
    linear = {name.removesuffix("A_log") for name in tensors if name.endswith(".A_log")}
    outputs = {f"{prefix}dense.weight": f"{prefix}o_proj.weight" for prefix in linear}
    return {outputs.get(name, name): value for name, value in tensors.items()}


def published_ling(tensors: Tensors) -> Tensors:
    """The tensors of `ling_model.Ling` as a checkpoint has them."""
    return {_name_on_hub(name): value for name, value in tensors.items()}


def _name_on_hub(name: str) -> str:
    for ours, theirs in (
        ("self_attn.o_proj", "attention.dense"),
        ("self_attn.", "attention."),
        ("gate.e_score_correction_bias", "gate.expert_bias"),
        ("model.embed_tokens", "model.word_embeddings"),
    ):
        name = name.replace(ours, theirs)
    return name
