"""Mistral 3: Mistral with the vision encoder of Pixtral. Source: arXiv:2410.07073, of Pixtral."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Merger, MergerLinear, Norm, Vision, VisionEncoder, VisionLayer
from jaxllm.models import mistral
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen2_5_vl import MEAN, STD

TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
}
READ_TEXT = {"ministral3": mistral.read_ministral3, "mistral4": mistral.read_mistral4}
"""By the model_type of a text model other than Mistral."""
VISION_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "hidden_act": "gelu",
}


def read(c: ConfigReader) -> ModelConfig:
    text, names, norm = c.text_part()
    text.refuse_unless("model_type", "mistral", *READ_TEXT)
    read_text = READ_TEXT.get(text.raw.get("model_type", ""), mistral.read)
    if read_text is mistral.read:
        text = text.with_defaults(**DEFAULTS)
    config = read_text(text, names=names, norm=text.rms_norm(norm))
    return replace(config, vision=_vision(c, config.hidden_size, config.norm.eps))


def _vision(c: ConfigReader, output_size: int, eps: float) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    v.refuse_unless("model_type", "pixtral")
    v.refuse_unless("num_channels", 3)
    c.refuse_unless("vision_feature_layer", -1)
    hidden_size, num_heads = v.integer("hidden_size"), v.integer("num_attention_heads")
    if hidden_size % (4 * num_heads):
        c.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of 4 times its {num_heads} heads")
    width, bias = v.integer("intermediate_size"), c.boolean("multimodal_projector_bias")
    qkv = tuple(f"attention.{letter}_proj" for letter in "qkv")
    linears = (
        MergerLinear(f"{PROJECTOR}patch_merger.merging_layer", hidden_size, bias=False),
        MergerLinear(f"{PROJECTOR}linear_1", output_size, c.activation("projector_hidden_act", "gelu"), bias),
        MergerLinear(f"{PROJECTOR}linear_2", output_size, bias=bias),
    )
    encoder = VisionEncoder(
        prefixes=(TOWER, PROJECTOR),
        patch=f"{TOWER}patch_conv",
        patch_bias=False,
        layer_name=f"{TOWER}transformer.layers.{{}}",
        layer=VisionLayer(
            Norm("attention_norm", 1e-5),
            Norm("ffn_norm", 1e-5),
            MLP(width, v.activation(default="gelu"), name="feed_forward"),
            qkv,
            "attention.o_proj",
            qkv_bias=False,
            out_bias=False,
        ),
        merger=Merger(linears, norm=Norm(f"{PROJECTOR}norm", eps), channel_major=True),
        first_norm=Norm(f"{TOWER}ln_pre", 1e-5),
        rope_theta=v.within("rope_parameters").number("rope_theta", v.number("rope_theta", 10000.0)),
        columns_turn_between=True,
    )
    return Vision(
        "pixtral",
        image_token_id=c.count("image_token_id", c.count("image_token_index", 10)),
        patch_size=v.integer("patch_size"),
        merge_size=c.integer("spatial_merge_size", 2),
        hidden_size=hidden_size,
        num_layers=v.integer("num_hidden_layers"),
        num_heads=num_heads,
        intermediate_size=width,
        output_size=output_size,
        image_mean=MEAN,
        image_std=STD,
        encoder=encoder,
    )
