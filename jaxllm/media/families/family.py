"""What a family of models says about images: their size, their patches, and the tokens that stand for them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from jaxllm.media.families.qwen_video import QwenVideo
from jaxllm.media.patches import to_patches
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Family(ABC):
    """The preparation of images for one model. Subclasses add their settings as fields; those that do not compare shape no patches."""

    image_processors: ClassVar[tuple[str, ...]]
    """Names of transformers' classes that prepare images the same way, without their endings Fast and Pil."""
    options: ClassVar[tuple[str, ...]]
    """Keys of mm_processor_kwargs that change something."""
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]
    """What the encoder normalises channels with."""
    placeholder: ClassVar[str]
    """The text that stands for an image in a prompt of plain text."""
    video: ClassVar[type[QwenVideo] | None] = None
    """The preparation of videos; None: the model takes none."""
    sizes: ClassVar[tuple[str, ...]] = ("patch_size", "merge_size", "temporal_patch_size")
    """Settings that must be as in config.json."""
    has_positions: ClassVar[bool] = False
    """Whether tokens get three-dimensional positions by the image's grid."""

    vision: Vision
    resample: Image.Resampling

    @classmethod
    @abstractmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int, directory: Path) -> Self:
        """By the settings of a checkpoint in a directory. Raises ConfigError."""

    @abstractmethod
    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height, in pixels, that an image is resized to."""

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """How many tiles an image of this size in pixels is cut into, and the rows and columns of embeddings of each."""
        width, height = self.resized(width, height)
        side = self.vision.patch_size * self.vision.merge_size
        return 1, height // side, width // side

    def patches(self, image: Image.Image) -> np.ndarray:
        """Patches of an RGB image, uint8 [patches, 3 · patch_size²], in the order in which the encoder takes them."""
        size = self.resized(*image.size)
        if size != image.size:
            image = image.resize(size, self.resample)
        return to_patches(image, self.vision.patch_size, self.vision.merge_size)

    def token_ids(self, width: int, height: int) -> list[int]:
        """The tokens of a prompt that stand for an image of this size in pixels: a placeholder for each embedding, and what the family
        puts between and around them."""
        return [self.vision.image_token_id] * math.prod(self.grid(width, height))

    def expand_text(self, text: str, num_images: int) -> str:
        """The text with what the family writes around each image, before it is tokenized."""
        return text

    def as_json(self) -> Mapping[str, Any]:
        """All that shapes the patches of an image: part of the hash of its content."""
        vision = {"patch_size": self.vision.patch_size, "merge_size": self.vision.merge_size, "family": self.vision.family}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.compare and field.name != "vision"}
        return own | vision
