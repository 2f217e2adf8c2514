"""Qwen 3 VL: Qwen 3 whose ropes turn by time, row and column, with a vision encoder for images of any size. Source: arXiv:2511.21631."""

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
    text, names, norm = c.text_part("model.language_model", "lm_head")
    text = text.with_defaults(**DEFAULTS, **defaults)
    rope = text.raw.get("rope_scaling") or text.raw.get("rope_parameters") or {}
    if isinstance(rope, dict):
        text = text.with_values(rope_scaling={**ROPE, **rope})
    return text, {"names": names, "norm": text.rms_norm(norm)}


def _seeing(c: ConfigReader, text: ModelConfig) -> ModelConfig:
    return replace(text, vision=_vision(c, text.hidden_size))


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    sizes = vision_sizes(c, v, output_size)
    positions = v.integer("num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        c.faults.append(f"num_position_embeddings is {positions}, must be a square")
    layers = layers_of_encoder(v, "deepstack_visual_indexes")
    width, activation = v.integer("intermediate_size"), v.activation("hidden_act", "gelu_pytorch_tanh")
    mlp = MLP(width, activation, gated=False, bias=True, gate_up=("linear_fc1",), down="linear_fc2")

    def linears(name: str) -> tuple[MergerLinear, ...]:
        return merger_linears(f"{name}.linear_fc1", f"{name}.linear_fc2", **sizes)

    added = [f"{VISUAL}deepstack_merger_list.{j}" for j in range(len(layers))]
    encoder = VisionEncoder(
        prefixes=(VISUAL,),
        patch=f"{VISUAL}patch_embed.proj",
        layer_name=f"{VISUAL}blocks.{{}}",
        layer=VisionLayer(_norm("norm1"), _norm("norm2"), mlp, ("attn.qkv",), "attn.proj"),
        merger=Merger(linears(f"{VISUAL}merger"), norm=_norm(f"{VISUAL}merger.norm")),
        deepstack=tuple(Merger(linears(name), joined_norm=_norm(f"{name}.norm")) for name in added),
        positions=f"{VISUAL}pos_embed.weight",
        rope_theta=v.within("rope_parameters").number("rope_theta", 10000.0),
    )
    return Vision("qwen3_vl", **sizes, position_grid=math.isqrt(positions), deepstack_layers=layers, encoder=encoder)


def _norm(name: str) -> Norm:
    return Norm(name, 1e-6, centred=True, bias=True)


def vision_sizes(c: ConfigReader, v: ConfigReader, output_size: int) -> dict[str, Any]:
    """The fields of a `Vision` that encoders of Qwen have. v: the reader of vision_config."""
    v.refuse_unless("in_channels", 3)
    v.refuse_unless("out_hidden_size", output_size)
    hidden_size, num_heads = v.integer("hidden_size"), v.integer("num_heads")
    if hidden_size % (4 * num_heads):
        c.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of 4 times its {num_heads} heads")
    return {
        "image_token_id": c.count("image_token_id", 151655),
        "video_token_id": c.count("video_token_id", 151656),
        "patch_size": v.integer("patch_size"),
        "merge_size": v.integer("spatial_merge_size"),
        "temporal_patch_size": v.integer("temporal_patch_size"),
        "hidden_size": hidden_size,
        "num_layers": v.integer("depth"),
        "num_heads": num_heads,
        "intermediate_size": v.integer("intermediate_size"),
        "output_size": output_size,
    }


def layers_of_encoder(v: ConfigReader, name: str) -> tuple[int, ...]:
    """A value that lists some of the encoder's layers."""
    given, num_layers = v.raw[name], v.integer("depth")
    is_list = isinstance(given, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in given)
    if not is_list or sorted(set(given)) != given:
        v.faults.append(f"{name} is {given!r}, must be ascending layers of the {num_layers} of vision_config")
        return ()
    return tuple(given)


def merger_linears(
    first: str, second: str, *, hidden_size: int, merge_size: int, output_size: int, **_: Any
) -> tuple[MergerLinear, ...]:
    """The two layers of a merger. first, second: their names; the sizes are those of a `Vision`."""
    return MergerLinear(first, hidden_size * merge_size**2, "gelu"), MergerLinear(second, output_size)
