"""InternVL 3 and 3.5, as transformers saves them: Qwen 2.5, Qwen 3 or Llama with the encoder of images InternViT, which takes tiles.

Source: arXiv:2504.10479.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Merger, MergerLinear, Norm, Vision, VisionEncoder, VisionLayer
from jaxllm.models import llama, qwen2, qwen3, qwen_moe
from jaxllm.models.config_reader import ConfigReader

TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
TEXT: dict[Any, Callable[..., ModelConfig]] = {
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
    "qwen3_moe": qwen_moe.read_qwen3_moe,
    "llama": llama.read,
}
"""By the text model's model_type."""
VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read(c: ConfigReader) -> ModelConfig:
    text, names, norm = c.text_part()
    text.refuse_unless("model_type", *TEXT)
    read_text = TEXT.get(text.raw.get("model_type"), qwen2.read)
    # As transformers 5 has it, or else 4.
    config = read_text(text, names=names, norm=text.rms_norm(norm))
    return replace(config, vision=_vision(c, config.hidden_size))


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    v.refuse_unless("model_type", "internvl_vision")
    v.refuse_unless("num_channels", 3)
    v.refuse_unless("use_absolute_position_embeddings", True)
    v.refuse_unless("use_mask_token", False)
    v.refuse_unless("norm_type", "layer_norm", "rms_norm")
    c.refuse_unless("vision_feature_layer", -1)
    c.refuse_unless("vision_feature_select_strategy", "default")
    hidden_size, num_heads = v.integer("hidden_size"), v.integer("num_attention_heads")
    if hidden_size % num_heads:
        c.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of its {num_heads} heads")
    patch_size, merge_size = _side(v, "patch_size"), int(1 / c.number("downsample_ratio", 0.5))
    grid = _side(v, "image_size") // patch_size
    if not grid or not merge_size or grid % merge_size:
        c.faults.append(
            f"downsample_ratio is {c.number('downsample_ratio', 0.5)}, does not divide the {grid} patches of a tile's side"
        )
    width, eps = v.integer("intermediate_size"), v.number("layer_norm_eps")
    is_plain = v.raw.get("norm_type") == "rms_norm"

    def norm(name: str) -> Norm:
        return Norm(name, eps) if is_plain else Norm(name, eps, centred=True, bias=True)

    layer = VisionLayer(
        norm("layernorm_before"),
        norm("layernorm_after"),
        MLP(width, v.activation(), gated=False, bias=True, gate_up=("fc1",), down="fc2"),
        tuple(f"attention.{letter}_proj" for letter in "qkv"),
        "attention.projection_layer",
        qkv_bias=v.boolean("attention_bias"),
        qk_norms=(Norm("attention.q_norm"), Norm("attention.k_norm")) if v.boolean("use_qk_norm") else None,
        scales=("lambda_1", "lambda_2"),
    )
    linears = (
        MergerLinear(f"{PROJECTOR}linear_1", output_size, c.activation("projector_hidden_act", "gelu")),
        MergerLinear(f"{PROJECTOR}linear_2", output_size),
    )
    has_norm = not v.boolean("use_mean_pooling", True)
    encoder = VisionEncoder(
        prefixes=(TOWER, PROJECTOR),
        patch=f"{TOWER}embeddings.patch_embeddings.projection",
        positions=f"{TOWER}embeddings.position_embeddings",
        class_token=f"{TOWER}embeddings.cls_token",
        layer_name=f"{TOWER}encoder.layer.{{}}",
        layer=layer,
        last_norm=Norm(f"{TOWER}layernorm", eps, centred=True, bias=True) if has_norm else None,
        merger=Merger(linears, joined_norm=Norm(f"{PROJECTOR}layer_norm", 1e-5, centred=True, bias=True)),
    )
    return Vision(
        "internvl",
        image_token_id=c.count("image_token_id", 151667),
        patch_size=patch_size,
        merge_size=max(1, merge_size),
        hidden_size=hidden_size,
        num_layers=v.integer("num_hidden_layers"),
        num_heads=num_heads,
        intermediate_size=width,
        output_size=output_size,
        position_grid=grid,
        image_mean=MEAN,
        image_std=STD,
        has_tiles=True,
        encoder=encoder,
    )


def _side(v: ConfigReader, name: str) -> int:
    """A length that may be written twice, as height and width."""
    given = v.raw[name]
    if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
        return v.with_values(**{name: given[0]}).integer(name)
    return v.integer(name)
