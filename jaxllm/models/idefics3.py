"""Idefics 3 and SmolVLM: Llama with the encoder of images of SigLIP, which takes tiles. Sources: arXiv:2408.12637, arXiv:2504.05299."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Merger, MergerLinear, Vision, VisionEncoder
from jaxllm.models import llama, siglip
from jaxllm.models.config_reader import ConfigReader

TOWER, CONNECTOR = "model.vision_model.", "model.connector."
VISION_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


def read(c: ConfigReader) -> ModelConfig:
    text, names, norm = c.text_part("model.text_model", "lm_head")
    text.refuse_unless("model_type", "llama")
    text.refuse_unless("qk_layer_norms", False)
    text = text.with_defaults(rms_norm_eps=1e-5)
    config = llama.read(text, names=names, norm=text.rms_norm(norm))
    return replace(config, vision=_vision(c, config.hidden_size))


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    sizes, merge_size = siglip.sizes(v), c.integer("scale_factor", 2)
    grid = sizes["position_grid"]
    if not grid or grid % merge_size:
        c.faults.append(f"scale_factor is {merge_size}, must divide the {grid} patches along each side of a tile")
    encoder = VisionEncoder(
        prefixes=(TOWER, CONNECTOR),
        # transformers finds rows of the table of positions by float32 products, for some sizes the wrong ones; not for those of models.
        **siglip.parts(v, TOWER),
        merger=Merger((MergerLinear(f"{CONNECTOR}modality_projection.proj", output_size, bias=False),)),
    )
    return Vision(
        "idefics3",
        image_token_id=c.count("image_token_id", 128257),
        merge_size=merge_size,
        output_size=output_size,
        **sizes,
        has_tiles=True,
        encoder=encoder,
    )
