"""What a family of models says about images: their size, their patches, and the tokens that stand for them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from jaxllm.media.families.qwen_video import QwenVideo
from jaxllm.media.patches import to_patches
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Family(ABC):
    """The preparation of images for one model. Subclasses add their settings as fields."""

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

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of embeddings of an image of this size in pixels."""
        width, height = self.resized(width, height)
        side = self.vision.patch_size * self.vision.merge_size
        return height // side, width // side

    def patches(self, image: Image.Image) -> np.ndarray:
        """Patches of an RGB image, uint8 [patches, 3 · patch_size²], in the order in which the encoder takes them."""
        size = self.resized(*image.size)
        if size != image.size:
            image = image.resize(size, self.resample)
        return to_patches(image, self.vision.patch_size, self.vision.merge_size)

    def token_ids(self, rows: int, columns: int) -> list[int]:
        """The tokens of a prompt that stand for an image of so many embeddings."""
        return [self.vision.image_token_id] * (rows * columns)

    def embedding_runs(self, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
        """(offset, count) of each run of these tokens that an embedding replaces; empty: all of them."""
        return ()

    def expand_text(self, text: str, num_images: int) -> str:
        """The text with what the family writes around each image, before it is tokenized."""
        return text

    def as_json(self) -> Mapping[str, Any]:
        """All that shapes the patches of an image: part of the hash of its content."""
        vision = {"patch_size": self.vision.patch_size, "merge_size": self.vision.merge_size, "family": self.vision.family}
        return {name: value for name, value in vars(self).items() if name != "vision"} | vision
