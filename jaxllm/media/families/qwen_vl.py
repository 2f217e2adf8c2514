"""Qwen2.5-VL and Qwen3-VL: images keep their shape, within an area; see Qwen2VLImageProcessor in transformers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from PIL import Image

from jaxllm.log import info_once
from jaxllm.media.families.family import CLIP_MEAN, CLIP_STD, HALF, Family
from jaxllm.media.families.qwen_video import QwenVideo, shrunk
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision


@dataclass(frozen=True)
class Qwen3VL(Family):
    """Sides become multiples of a merged patch; the area is between min_pixels and max_pixels."""

    image_processors: ClassVar = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
    options: ClassVar = ("min_pixels", "max_pixels", "size", "resample")
    mean: ClassVar = HALF
    std: ClassVar = HALF
    placeholder: ClassVar = "<|vision_start|><|image_pad|><|vision_end|>"
    has_positions: ClassVar = True
    video: ClassVar[type[QwenVideo] | None] = QwenVideo
    default_pixels: ClassVar[tuple[int, int]] = (65_536, 16_777_216)

    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int, directory: Path) -> Self:
        low, high = cls.default_pixels
        size = settings.sizes("size", "shortest_edge", "longest_edge", "min_pixels", "max_pixels")  # which hold areas here
        low = settings.integer("min_pixels", size.get("shortest_edge", size.get("min_pixels", low)))
        high = settings.integer("max_pixels", size.get("longest_edge", size.get("max_pixels", high)))
        most = max_patches * vision.patch_size**2
        if low > min(high, most):
            limit = f"max_pixels, {high}" if high <= most else f"{most}, the pixels of mm_max_patches={max_patches}"
            settings.fault(f"min_pixels is {low}, more than {limit}; lower it")
        if high > most:
            info_once(
                f"images get at most {most} pixels ({max_patches} patches, {max_patches // vision.merge_size**2} tokens), fewer than the "
                "model takes: raise --mm-max-patches for more"
            )
        return cls(vision, settings.resample(Image.Resampling.BICUBIC), low, min(high, most))

    def resized(self, width: int, height: int) -> tuple[int, int]:
        side = self.vision.patch_size * self.vision.merge_size
        new_width, new_height = round(width / side) * side, round(height / side) * side
        if new_width * new_height > self.max_pixels:
            new_width, new_height = shrunk(width, height, side, math.sqrt(width * height / self.max_pixels))
        elif new_width * new_height < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            new_width, new_height = math.ceil(width * grow / side) * side, math.ceil(height * grow / side) * side
        return new_width, new_height


@dataclass(frozen=True)
class Qwen2_5VL(Qwen3VL):
    """Other numbers by default. Its videos, which have other positions, are not prepared."""

    video: ClassVar[type[QwenVideo] | None] = None
    mean: ClassVar = CLIP_MEAN
    std: ClassVar = CLIP_STD
    default_pixels: ClassVar = (3_136, 12_845_056)
