"""Qwen 3 VL: Qwen 3 whose ropes turn by time, row and column, with an encoder of images of any size. Source: arXiv:2511.21631."""

import math
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Merger, MergerLinear, Norm, Vision, VisionEncoder, VisionLayer
from jaxllm.models import qwen3, qwen_moe
from jaxllm.models.config_reader import ConfigReader

VISUAL = "model.visual."
ROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def read(c: ConfigReader) -> ModelConfig:
    """With dense layers."""
    text, fields = _text(c, num_key_value_heads=32, head_dim=128)
    return _seeing(c, qwen3.read(text, **fields))


def read_moe(c: ConfigReader) -> ModelConfig:
    """With mixtures of experts."""
    text, fields = _text(c, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4)
    names = {"gate_up": ("experts.gate_up_proj",), "down": "experts.down_proj"}
    moe = qwen_moe.read_moe(text, 1408, **names, transposed=True)
    moe = replace(moe, routing=replace(moe.routing, renormalize=True))
    return _seeing(c, qwen_moe.read_qwen3_moe(text, moe, **fields))


def _text(c: ConfigReader, **defaults: Any) -> tuple[ConfigReader, dict[str, Any]]:
    """The reader of the text model, and fields that are not in its part of the config."""
    text, names, norm = c.text_part(VISUAL, prefix="model.language_model", head="lm_head")
    text = text.with_defaults(**DEFAULTS, **defaults)
    rope = text.raw.get("rope_scaling") or text.raw.get("rope_parameters") or {}
    if isinstance(rope, dict):
        text = text.with_values(rope_scaling={**ROPE, **rope})
    # Whether the head is tied stands outside of the text model's part.
    is_tied = c.boolean("tie_word_embeddings")
    return text, {"names": names, "norm": text.rms_norm(norm), "tie_word_embeddings": is_tied}


def _seeing(c: ConfigReader, text: ModelConfig) -> ModelConfig:
    return replace(text, vision=_vision(c, text.hidden_size))


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    v.refuse_unless("in_channels", 3)
    v.refuse_unless("out_hidden_size", output_size)
    positions = v.integer("num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        c.faults.append(f"num_position_embeddings is {positions}, must be a square")
    hidden_size, num_heads, num_layers = v.integer("hidden_size"), v.integer("num_heads"), v.integer("depth")
    if hidden_size % (4 * num_heads):
        c.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of 4 times its {num_heads} heads")
    layers = v.raw["deepstack_visual_indexes"]
    if (
        not isinstance(layers, list)
        or not all(type(i) is int and 0 <= i < num_layers for i in layers)
        or sorted(set(layers)) != layers
    ):
        c.faults.append(
            f"deepstack_visual_indexes is {layers!r}, must be ascending layers of the {num_layers} of vision_config"
        )
        layers = []
    merge_size = v.integer("spatial_merge_size")
    joined = hidden_size * merge_size**2
    mlp = MLP(
        v.integer("intermediate_size"),
        v.activation("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        bias=True,
        gate_up=("linear_fc1",),
        down="linear_fc2",
    )

    def linears(name: str) -> tuple[MergerLinear, ...]:
        return (MergerLinear(f"{name}.linear_fc1", joined, "gelu"), MergerLinear(f"{name}.linear_fc2", output_size))

    added = [f"{VISUAL}deepstack_merger_list.{j}" for j in range(len(layers))]
    encoder = VisionEncoder(
        prefixes=(VISUAL,),
        patch=f"{VISUAL}patch_embed.proj",
        layer_name=f"{VISUAL}blocks.{{}}",
        layer=VisionLayer(_norm("norm1"), _norm("norm2"), mlp, ("attn.qkv",), "attn.proj"),
        merger=Merger(linears(f"{VISUAL}merger"), norm=_norm(f"{VISUAL}merger.norm")),
        deepstack=tuple(Merger(linears(name), joined_norm=_norm(f"{name}.norm")) for name in added),
        positions=f"{VISUAL}pos_embed",
        rope_theta=v.within("rope_parameters").number("rope_theta", 10000.0),
    )
    return Vision(
        family="qwen3_vl",
        image_token_id=c.count("image_token_id", 151655),
        patch_size=v.integer("patch_size"),
        merge_size=merge_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=mlp.width,
        output_size=output_size,
        temporal_patch_size=v.integer("temporal_patch_size"),
        position_grid=math.isqrt(positions),
        deepstack_layers=tuple(layers),
        video_token_id=c.count("video_token_id", 151656),
        encoder=encoder,
    )


def _norm(name: str) -> Norm:
    return Norm(name, 1e-6, centred=True, bias=True)
