"""Pictures of many sizes and modes, drawn the same way everywhere, and descriptions of models that see them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from jaxllm.media.media import Media
from jaxllm.media.options import MediaOptions
from jaxllm.media.processor import MediaProcessor, make_processor
from jaxllm.model_parts.vision import Vision, VisionFamily

SIZES = (
    *((1, 1), (1, 37), (200, 1), (31, 33), (32, 32), (16, 16), (48, 16), (80, 240), (255, 257), (64, 4096)),
    *((640, 480), (480, 640), (97, 1301), (3000, 100), (1000, 999), (28, 28), (42, 14), (1540, 1540), (1541, 770), (896, 896)),
    *((1920, 1080), (500, 333), (333, 500), (1024, 1024), (12, 2399), (224, 224), (100, 101), (1281, 721), (2, 3), (719, 719)),
    *((56, 112), (300, 2), (1600, 901)),
)
"""(width, height), among them some whose halves are rounded to even, and some at the limits of each family's rule."""
VISIONS: dict[VisionFamily, Vision] = {
    "qwen3_vl": Vision("qwen3_vl", 500, 16, 2, 32, 2, 2, 64, 64, temporal_patch_size=2, position_grid=8),
    "qwen2_5_vl": Vision("qwen2_5_vl", 500, 14, 2, 32, 2, 2, 64, 64, temporal_patch_size=2),
    "gemma3": Vision("gemma3", 500, 14, 4, 32, 2, 2, 64, 64, position_grid=64),
    "pixtral": Vision("pixtral", 500, 14, 2, 32, 2, 2, 64, 64),
    "internvl": Vision("internvl", 503, 14, 2, 32, 2, 2, 64, 64, position_grid=4, has_tiles=True),
    "idefics3": Vision("idefics3", 500, 14, 3, 32, 2, 2, 64, 64, position_grid=6, has_tiles=True),
}
BREAK_ID, END_ID = 501, 502
TILE_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<IMG_CONTEXT>", "<img>", "</img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
"""From id 500 on."""
NEWLINES = 256
"""The id of two newlines."""
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SETTINGS: dict[VisionFamily, dict[str, Any]] = {
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        **HALF,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        **CLIP,
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2, **HALF},
    "pixtral": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 1540},
        "patch_size": {"height": 14, "width": 14},
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        **CLIP,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 56, "width": 56},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "idefics3": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 344},
        "max_image_size": {"longest_edge": 86},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        **HALF,
    },
}
"""Of checkpoints on the hub, but tiles are smaller."""


def write_settings(directory: Path, family: VisionFamily, **changed: Any) -> None:
    """Write what a checkpoint says about images; `changed` is laid over it."""
    (directory / "preprocessor_config.json").write_text(json.dumps({**SETTINGS[family], **changed}))
    tokens = {str(BREAK_ID): {"content": "[IMG_BREAK]"}, str(END_ID): {"content": "[IMG_END]"}}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    if VISIONS[family].has_tiles:
        write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a token for each byte, NEWLINES for two newlines, and from 500 on those of TILE_TOKENS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: id for id, text in enumerate([*alphabet, "ĊĊ", *(f"unused {i}" for i in range(243))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in TILE_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))


def processor(directory: Path, family: VisionFamily = "qwen3_vl", **options: Any) -> MediaProcessor:
    """What prepares images of a family, as its checkpoints want it."""
    write_settings(directory, family)
    return make_processor(directory, VISIONS[family], MediaOptions(**options))


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]: slopes, stripes, a disc, and noise from a small formula, so that it is the same with any NumPy."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    noise = (x * 7919 + y * 104729 + seed * 1299709) ** 2 % 251
    disc = ((2 * x - width) ** 2 + (2 * y - height) ** 2 < (min(width, height) * 0.8) ** 2) * 90
    bands = np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x // 5 + y // 3) % 2 * 160], axis=-1)
    return ((bands + disc[..., None] + noise[..., None] // 3) % 256).astype(np.uint8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(width, height, seed))


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def media(data: Any, name: str = "messages[0].content[1]", uuid: str | None = None) -> Media:
    return Media("image", data, uuid, name)
