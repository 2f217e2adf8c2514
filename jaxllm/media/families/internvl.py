"""InternVL: images are resized to the tiles whose shape is nearest; see GotOcr2ImageProcessor and InternVLProcessor in transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from PIL import Image

from jaxllm.log import info_once
from jaxllm.media.families.family import IMAGENET_MEAN, IMAGENET_STD
from jaxllm.media.families.tiles import Tiled, most_tiles, with_whole
from jaxllm.media.families.tokens import token_ids
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision

START, END = "<img>", "</img>"


@dataclass(frozen=True)
class InternVL(Tiled):
    """A token stands before the embeddings of all tiles, and one behind them."""

    image_processors: ClassVar = ("GotOcr2ImageProcessor",)
    options: ClassVar = ("min_patches", "max_patches", "resample")  # which count tiles
    mean: ClassVar = IMAGENET_MEAN
    std: ClassVar = IMAGENET_STD
    placeholder: ClassVar = "<IMG_CONTEXT>"
    sizes: ClassVar = ()

    fewest: int
    """Tiles of an image, without the whole image."""
    most: int
    start_token_id: int
    end_token_id: int

    @classmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int, directory: Path) -> Self:
        side = vision.position_grid * vision.patch_size
        size = settings.sizes("size", "height", "width")
        if size and set(size.values()) != {side}:
            settings.fault(f"size is {dict(size)}, must be {side} x {side}, which the encoder has positions for")
        fewest, most = settings.integer("min_patches", 1), settings.integer("max_patches", 12)
        tiles = most_tiles(vision, settings, max_patches)
        if with_whole(most) > tiles:
            info_once(f"images get at most {tiles} tiles, fewer than the model takes: raise --mm-max-patches for more")
            most = max(1, tiles - 1)
        if fewest > most:
            settings.fault(
                f"min_patches is {fewest}, must be at most {most}: max_patches, or what --mm-max-patches leaves of it"
            )
        start, end = token_ids(directory, settings, START, END)
        return cls(vision, settings.resample(Image.Resampling.BICUBIC), side, fewest, most, start, end)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Of the arrangements of tiles that are nearest to the image's shape the one with most tiles, unless these are twice its area."""
        ratio, area = width / height, width * height
        arrangements = [
            (columns, rows)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most // columns + 1)
            if columns * rows >= self.fewest
        ]
        best, least = (1, 1), float("inf")
        for columns, rows in sorted(arrangements, key=lambda tiles: tiles[0] * tiles[1]):
            off = abs(ratio - columns / rows)
            if off < least or (off == least and area > 0.5 * self.side**2 * columns * rows):
                best, least = (columns, rows), off
        return best[0] * self.side, best[1] * self.side

    def cut(self, image: Image.Image) -> list[Image.Image]:
        tiles = self.tiles_of(image.resize(self.resized(*image.size), self.resample))
        return tiles if len(tiles) == 1 else [*tiles, image.resize((self.side, self.side), self.resample)]

    def token_ids(self, width: int, height: int) -> list[int]:
        return [self.start_token_id, *super().token_ids(width, height), self.end_token_id]
