"""Gemma 3: every image becomes a square of one size; see Gemma3ImageProcessor in transformers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from PIL import Image

from jaxllm.errors import InvalidRequestError
from jaxllm.media.families.family import HALF, Family
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision

START, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True)
class Gemma3(Family):
    """Sides are those of the encoder's table of positions."""

    image_processors: ClassVar = ("Gemma3ImageProcessor",)
    options: ClassVar = ("resample",)
    mean: ClassVar = HALF
    std: ClassVar = HALF
    placeholder: ClassVar = START

    side: int
    """Pixels along each side."""

    @classmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int, directory: Path) -> Self:
        side = vision.position_grid * vision.patch_size
        size = settings.sizes("size", "height", "width")
        if size and set(size.values()) != {side}:
            settings.fault(f"size is {dict(size)}, must be {side} x {side}, which the encoder has positions for")
        if vision.position_grid**2 > max_patches:
            settings.fault(
                f"mm_max_patches is {max_patches}, must be at least {vision.position_grid**2}, the patches of each image"
            )
        return cls(vision, settings.resample(Image.Resampling.BILINEAR), side)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        return self.side, self.side

    def expand_text(self, text: str, num_images: int) -> str:
        """Each start token becomes that, the tokens of an image and its end, between empty lines, which merge with neighbours."""
        if SOFT in text:
            return text  # it is expanded already
        if (found := text.count(START)) != num_images:
            raise InvalidRequestError(
                f"the prompt has {found} times {START} and {num_images} image(s); put it once where each image belongs",
                "prompt",
            )
        num_tokens = math.prod(self.grid(self.side, self.side))
        return text.replace(START, f"\n\n{START}{SOFT * num_tokens}{END}\n\n")
