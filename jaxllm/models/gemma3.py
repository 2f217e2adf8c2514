"""Gemma 3 with the encoder of images of SigLIP: images of one size, whose tokens see each other.

Sources: arXiv:2503.19786, arXiv:2303.15343.
"""

import math
from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Merger, MergerLinear, Norm, Vision, VisionEncoder, VisionLayer
from jaxllm.models import gemma
from jaxllm.models.config_reader import ConfigReader

TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector"
VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}


def read(c: ConfigReader) -> ModelConfig:
    """A checkpoint of the text model alone has no vision_config."""
    config = gemma.read_gemma3(c)
    return replace(config, vision=_vision(c, config.hidden_size)) if c.raw.get("vision_config") else config


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    v.refuse_unless("model_type", "siglip_vision_model")
    v.refuse_unless("num_channels", 3)
    hidden_size, num_heads = v.integer("hidden_size"), v.integer("num_attention_heads")
    if hidden_size % num_heads:
        c.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of its {num_heads} heads")
    patch_size, width, eps = v.integer("patch_size"), v.integer("intermediate_size"), v.number("layer_norm_eps")
    grid, num_tokens = v.integer("image_size") // patch_size, c.integer("mm_tokens_per_image", 256)
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or not grid or grid % side:
        c.faults.append(
            f"mm_tokens_per_image is {num_tokens}, must be a square whose root divides the {grid} patches along each side of an image"
        )
    mlp = MLP(width, v.activation("hidden_act", "gelu_pytorch_tanh"), gated=False, bias=True, gate_up=("fc1",), down="fc2")
    qkv = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
    linear = MergerLinear(PROJECTOR, output_size, bias=False, weight="mm_input_projection_weight", transposed=True)
    encoder = VisionEncoder(
        prefixes=(TOWER, f"{PROJECTOR}."),
        other_prefix=f"{TOWER}vision_model.",
        ignored=(f"{TOWER}head.",),
        patch=f"{TOWER}embeddings.patch_embedding",
        positions=f"{TOWER}embeddings.position_embedding",
        layer_name=f"{TOWER}encoder.layers.{{}}",
        layer=VisionLayer(_norm("layer_norm1", eps), _norm("layer_norm2", eps), mlp, qkv, "self_attn.out_proj"),
        last_norm=_norm(f"{TOWER}post_layernorm", eps),
        merger=Merger((linear,), joined_norm=Norm(f"{PROJECTOR}.mm_soft_emb_norm", eps, weight_offset=1.0), averages=True),
    )
    return Vision(
        "gemma3",
        image_token_id=c.count("image_token_id", c.count("image_token_index", 262144)),
        patch_size=patch_size,
        merge_size=max(1, grid // side),
        hidden_size=hidden_size,
        num_layers=v.integer("num_hidden_layers"),
        num_heads=num_heads,
        intermediate_size=width,
        output_size=output_size,
        position_grid=grid,
        attends_within=True,
        encoder=encoder,
    )


def _norm(name: str, eps: float) -> Norm:
    return Norm(name, eps, centred=True, bias=True)
