"""Qwen 2.5 VL: Qwen 2 whose ropes turn by time, row and column, with a vision encoder for images of any size that attends within windows.

Source: arXiv:2502.13923.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Merger, Names, Norm, Vision, VisionEncoder, VisionLayer
from jaxllm.models import qwen2
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen3_vl import layers_of_encoder, merger_linears, vision_sizes

VISUAL = "visual."
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def read(c: ConfigReader) -> ModelConfig:
    # Released checkpoints have the text model's values outside, those that transformers 5 saves in a part of their own.
    text = (c.within("text_config") if "text_config" in c.raw else c).with_defaults(**DEFAULTS)
    is_tied = c.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings"))
    config = qwen2.read(text, names=Names(is_part=True), tie_word_embeddings=is_tied)
    if config.attentions[0].rope is None or config.attentions[0].rope.sections is None:
        c.faults.append("mrope_section of rope_scaling is missing")
    return replace(config, vision=_vision(c, config.hidden_size))


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    sizes = vision_sizes(c, v, output_size)
    cell = sizes["patch_size"] * sizes["merge_size"]
    cells = v.integer("window_size") // cell
    if not cells:
        c.faults.append(f"window_size is {v.integer('window_size')}, must be at least {cell}, the side of merged patches")
    encoder = VisionEncoder(
        prefixes=(VISUAL,),
        patch=f"{VISUAL}patch_embed.proj",
        patch_bias=False,
        layer_name=f"{VISUAL}blocks.{{}}",
        layer=VisionLayer(
            Norm("norm1"),
            Norm("norm2"),
            MLP(v.integer("intermediate_size"), v.activation(), bias=True),
            ("attn.qkv",),
            "attn.proj",
        ),
        merger=Merger(
            merger_linears(f"{VISUAL}merger.mlp.0", f"{VISUAL}merger.mlp.2", **sizes), norm=Norm(f"{VISUAL}merger.ln_q")
        ),
        rope_theta=v.within("rope_parameters").number("rope_theta", 10000.0),
        window=cells * sizes["merge_size"],
        full_layers=layers_of_encoder(v, "fullatt_block_indexes"),
    )
    return Vision("qwen2_5_vl", **sizes, image_mean=MEAN, image_std=STD, encoder=encoder)
