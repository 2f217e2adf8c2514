"""How each family of models prepares images: a file per family, and the registry by `Vision.family`."""

from jaxllm.media.families.family import Family
from jaxllm.media.families.gemma3 import Gemma3
from jaxllm.media.families.idefics3 import Idefics3
from jaxllm.media.families.internvl import InternVL
from jaxllm.media.families.pixtral import Pixtral
from jaxllm.media.families.qwen_vl import Qwen2_5VL, Qwen3VL
from jaxllm.model_parts.vision import VisionFamily

FAMILIES: dict[VisionFamily, type[Family]] = {
    "qwen3_vl": Qwen3VL,
    "qwen2_5_vl": Qwen2_5VL,
    "gemma3": Gemma3,
    "pixtral": Pixtral,
    "idefics3": Idefics3,
    "internvl": InternVL,
}

__all__ = ["FAMILIES", "Family"]
