"""Gemma 3 with the encoder of images of SigLIP: images of one size, whose tokens see each other.

Sources: arXiv:2503.19786, arXiv:2303.15343.
"""

import math
from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Merger, MergerLinear, Norm, Vision, VisionEncoder
from jaxllm.models import gemma, siglip
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
    sizes, eps = siglip.sizes(v), v.number("layer_norm_eps")
    grid, num_tokens = sizes["position_grid"], c.integer("mm_tokens_per_image", 256)
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or not grid or grid % side:
        c.faults.append(
            f"mm_tokens_per_image is {num_tokens}, must be a square whose root divides the {grid} patches along each side of an image"
        )
    linear = MergerLinear(PROJECTOR, output_size, bias=False, weight="mm_input_projection_weight", transposed=True)
    encoder = VisionEncoder(
        prefixes=(TOWER, f"{PROJECTOR}."),
        other_prefix=f"{TOWER}vision_model.",
        ignored=(f"{TOWER}head.",),
        **siglip.parts(v, TOWER),
        merger=Merger((linear,), joined_norm=Norm(f"{PROJECTOR}.mm_soft_emb_norm", eps, weight_offset=1.0), averages=True),
    )
    return Vision(
        "gemma3",
        image_token_id=c.count("image_token_id", c.count("image_token_index", 262144)),
        merge_size=max(1, grid // side),
        output_size=output_size,
        **sizes,
        attends_within=True,
        encoder=encoder,
    )
