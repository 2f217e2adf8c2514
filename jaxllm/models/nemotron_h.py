"""Nemotron-H and Nemotron 3, also the text of Omni: layers of one part each, which is Mamba-2, attention without positions, an MLP or
experts.

Sources: arXiv:2504.03624, arXiv:2512.20848 (experts), NVIDIA's Nemotron 3 white paper, 2025 (experts in a latent space).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer, Mamba2, MoE, Names, NextToken
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.deepseek_routing import sigmoid_moe

DEFAULTS = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_groups": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
# No kernel computes experts without a gate from few bits: only a checkpoint that has them so asks for it.
NAMES = Names("backbone.embeddings", "backbone.layers.{}", ignored=("mtp.",), unquantized=("mixer.experts",))
OMNI_NAMES = replace(
    NAMES,
    embedding=f"language_model.{NAMES.embedding}",
    layer=f"language_model.{NAMES.layer}",
    head="language_model.lm_head",
    ignored=(
        "language_model.mtp.",
        "mtp.",
        "vision_",
        "radio_model.",
        "mlp1.",
        "sound_",
        "audio_",
        "embed_audio.",
        "multi_modal_",
    ),
)
"""With those of encoders of images, videos and audio, which are not built."""
KINDS = {"M": "M", "mamba": "M", "linear_attention": "M", "*": "*", "attention": "*", "full_attention": "*"}
KINDS |= {"-": "-", "mlp": "-", "E": "E", "moe": "E"}
"""The letter of hybrid_override_pattern for each name of a layer's part."""
OLDER_NAMES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}


def read(c: ConfigReader) -> ModelConfig:
    given = c.raw.get("layers_block_type") or c.raw.get("hybrid_override_pattern") or c.raw.get("layer_types")
    kinds = _kinds(c, given)
    older = {name: c.raw[old] for old, name in OLDER_NAMES.items() if old in c.raw}
    eps = c.number("layer_norm_epsilon", 1e-5)
    c = c.with_defaults(**DEFAULTS)
    c = c.with_values(**older, rms_norm_eps=eps, num_hidden_layers=len(kinds), layer_types=None)
    c.refuse_unless("mlp_hidden_act", "relu2")
    c.refuse_unless("mamba_hidden_act", "silu")
    c.refuse_unless("sliding_window", None)
    c.refuse_unless("residual_in_fp32", False)
    c.refuse_unless("attention_bias", False)
    attention = replace(c.attention(None), name="mixer")
    norm = c.rms_norm("norm")
    layers = {
        "*": lambda: Layer(attention, None, norm, None),
        "M": lambda: Layer(_mamba(c), None, norm, None),
        "-": lambda: Layer(None, _mlp(c, "mixer", c.integer("intermediate_size", 21504)), None, norm),
        "E": lambda: Layer(None, _moe(c), None, norm),
    }
    made = {kind: layers[kind]() for kind in dict.fromkeys(kinds)}
    fields = {"norm": c.rms_norm("backbone.norm_f"), "names": NAMES, "next_token": _next_token(c, layers)}
    return c.decoder([made[kind] for kind in kinds], c.integer("max_position_embeddings"), **fields)


def read_omni(c: ConfigReader) -> ModelConfig:
    """The text model of Nemotron 3 Omni."""
    text = c.within("llm_config" if c.raw.get("llm_config") else "text_config")
    config = read(text.with_values(**{name: c.raw[name] for name in ("bos_token_id",) if c.raw.get(name) is not None}))
    norm = replace(config.norm, name=f"language_model.{config.norm.name}")
    return replace(config, names=OMNI_NAMES, norm=norm, num_spare_layers=0, next_token=NextToken())


def _next_token(c: ConfigReader, layers: Mapping[str, Callable[[], Layer]]) -> NextToken:
    """A module of layers of one part each. layers: makes one, by the letter of its part."""
    if not c.count("num_nextn_predict_layers", 0):
        return NextToken()
    kinds = _kinds(c, c.raw.get("mtp_layers_block_type") or c.raw.get("mtp_hybrid_override_pattern") or "*E", "mtp_")
    made = tuple(layers[kind]() for kind in kinds)
    return NextToken(layers=made, layer="mtp.layers.{}", norm=f"mtp.layers.{len(kinds) - 1}.final_layernorm")


def _kinds(c: ConfigReader, given: object, prefix: str = "") -> list[str]:
    if not isinstance(given, (str, list)) or not given or not all(isinstance(kind, str) and kind in KINDS for kind in given):
        c.faults.append(
            f"{prefix}hybrid_override_pattern or {prefix}layers_block_type is {given!r}, must consist of {', '.join(KINDS)}"
        )
        return ["*"]
    return [KINDS[kind] for kind in given]


def _mamba(c: ConfigReader) -> Mamba2:
    return c.mamba2(
        c.integer("mamba_num_heads", 128),
        c.integer("n_groups"),
        c.integer("mamba_head_dim", 64),
        c.integer("ssm_state_size", 128),
        c.integer("conv_kernel", 4),
        c.rms_norm("mixer.norm"),
        conv_bias=c.boolean("use_conv_bias", True),
        bias=c.boolean("use_bias"),
        name="mixer",
    )


def _mlp(c: ConfigReader, name: str, width: int) -> MLP:
    return MLP(width, "relu2", gated=False, bias=c.boolean("mlp_bias"), name=name, gate_up=("up_proj",))


def _moe(c: ConfigReader) -> MoE:
    c.refuse_unless("mlp_bias", False)
    return replace(
        sigmoid_moe(c, "float32"),
        activation="relu2",
        gated=False,
        shared=_mlp(c, "mixer.shared_experts", c.integer("moe_shared_expert_intermediate_size", 7688)),
        latent_dim=c.integer_or_none("moe_latent_size"),
        name="mixer",
        gate_up=("experts.{}.up_proj",),
    )
