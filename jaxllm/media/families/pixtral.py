"""Pixtral and Mistral 3: images keep their shape, up to a longest side; see PixtralImageProcessor in transformers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from PIL import Image

from jaxllm.log import info_once
from jaxllm.media.families.family import CLIP_MEAN, CLIP_STD, Family
from jaxllm.media.families.tokens import token_ids
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True)
class Pixtral(Family):
    """Sides are rounded up to whole merged patches. A token ends each row, another the last; they keep their own embeddings."""

    image_processors: ClassVar = ("PixtralImageProcessor",)
    options: ClassVar = ("size", "resample")
    mean: ClassVar = CLIP_MEAN
    std: ClassVar = CLIP_STD
    placeholder: ClassVar = "[IMG]"
    sizes: ClassVar = ()  # transformers does not use those of the file either

    longest_edge: int
    break_token_id: int
    end_token_id: int

    @classmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int, directory: Path) -> Self:
        longest = settings.sizes("size", "longest_edge").get("longest_edge", 1024)
        side = vision.patch_size * vision.merge_size
        most = math.isqrt(max_patches) // vision.merge_size * side
        if longest > most:
            info_once(f"images get at most {most} pixels a side, fewer than the model takes: raise --mm-max-patches for more")
        break_id, end_id = token_ids(directory, settings, BREAK, END)
        return cls(vision, settings.resample(Image.Resampling.BICUBIC), min(longest, most), break_id, end_id)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        side = self.vision.patch_size * self.vision.merge_size
        if (shrink := max(height / self.longest_edge, width / self.longest_edge)) > 1:
            width, height = max(1, math.floor(width / shrink)), max(1, math.floor(height / shrink))
        return ((width - 1) // side + 1) * side, ((height - 1) // side + 1) * side

    def token_ids(self, width: int, height: int) -> list[int]:
        _, rows, columns = self.grid(width, height)
        ids = ([self.vision.image_token_id] * columns + [self.break_token_id]) * rows
        ids[-1] = self.end_token_id
        return ids
