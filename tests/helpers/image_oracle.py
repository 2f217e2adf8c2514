"""What transformers' image processors make of a picture, as the uint8 patches that an encoder gets here."""

import hashlib
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxllm.model_parts.vision import VisionFamily
from tests.helpers.images import SETTINGS, VISIONS

GOLDENS = Path(__file__).parent.parent / "goldens" / "images.json"
_CLASSES = {
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "pixtral": ("pixtral", "PixtralImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
    "idefics3": ("smolvlm", "SmolVLMImageProcessorPil"),
}


def digest(patches: np.ndarray) -> str:
    """Of the shape and the values."""
    return hashlib.sha256(repr(patches.shape).encode() + np.ascontiguousarray(patches).tobytes()).hexdigest()


def oracle(family: VisionFamily, image: Image.Image, **given: Any) -> np.ndarray:
    """uint8 [patches, 3 · patch_size²] in merge order, of the values that transformers computes; those are levels of uint8 to 1e-5."""
    vision, values = VISIONS[family], transformers_values(family, image, **given)
    levels = values * 255
    assert np.abs(levels - np.round(levels)).max() < 1e-2
    return np.round(levels).astype(np.uint8).reshape(-1, 3 * vision.patch_size**2)


def transformers_values(family: VisionFamily, image: Image.Image, **given: Any) -> np.ndarray:
    """[patches, 3, patch_size, patch_size] of 0 to 1, in merge order: what transformers computes, with normalisation undone."""
    vision, settings = VISIONS[family], dict(SETTINGS[family])
    module, name = _CLASSES[family]
    kind = getattr(importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), name)
    settings.pop("image_processor_type")
    patch, merge = vision.patch_size, vision.merge_size
    if family == "pixtral":
        given["patch_size"] = patch * merge  # as PixtralProcessor has it
    if family == "internvl":
        given["crop_to_patches"] = True  # as InternVLProcessor has it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kind(**settings)(image, return_tensors="np", **given)["pixel_values"]
    mean, std = (np.array(settings[key]) for key in ("image_mean", "image_std"))
    if vision.temporal_patch_size == 1:  # the whole picture, or its tiles, which are laid below each other
        side = vision.position_grid * patch if vision.has_tiles else None
        found = np.concatenate([np.reshape(each, (-1, *np.shape(each)[-3:])) for each in found])[..., :side, :side]
        whole = found.swapaxes(0, 1).reshape(3, -1, found.shape[-1])
        _, height, width = whole.shape
        cut = whole.reshape(3, height // patch // merge, merge, patch, width // patch // merge, merge, patch)
        found = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch)
    else:
        frames = found.reshape(-1, 3, vision.temporal_patch_size, patch, patch)
        assert (frames[:, :, :1] == frames).all()
        found = frames[:, :, 0]
    return found * std[:, None, None] + mean[:, None, None]
