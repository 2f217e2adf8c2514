"""Families that cut images into tiles of one size, which the encoder takes one by one."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from PIL import Image

from jaxllm.media.families.family import Family
from jaxllm.media.patches import to_patches
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision


@dataclass(frozen=True)
class Tiled(Family):
    """An image is resized to whole tiles, which come row by row; behind them comes the whole image as one more, if they are several."""

    side: int
    """Pixels along each side of a tile."""

    @abstractmethod
    def cut(self, image: Image.Image) -> list[Image.Image]:
        """The tiles of an image."""

    def rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        """How many tiles lie below and beside each other."""
        width, height = self.resized(width, height)
        return height // self.side, width // self.side

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        rows, columns = self.rows_and_columns(width, height)
        cells = self.vision.position_grid // self.vision.merge_size
        return with_whole(rows * columns), cells, cells

    def patches(self, image: Image.Image) -> np.ndarray:
        whole = self.vision.position_grid * self.vision.patch_size  # the encoder leaves out what is less than a patch
        tiles = (tile.crop((0, 0, whole, whole)) for tile in self.cut(image))
        return np.concatenate([to_patches(tile, self.vision.patch_size, self.vision.merge_size) for tile in tiles])

    def tiles_of(self, image: Image.Image) -> list[Image.Image]:
        """Those of an image whose sides are whole tiles, row by row."""
        side = self.side
        corners = [(left, top) for top in range(0, image.height, side) for left in range(0, image.width, side)]
        return [image.crop((left, top, left + side, top + side)) for left, top in corners]


def with_whole(tiles: int) -> int:
    """The number of tiles, with the whole image behind them if they are several."""
    return tiles + (tiles > 1)


def most_tiles(vision: Vision, settings: Settings, max_patches: int) -> int:
    """The most tiles that these patches make. Raises ConfigError if that is none."""
    of_tile = vision.position_grid**2
    if of_tile > max_patches:
        settings.fault(f"mm_max_patches is {max_patches}, must be at least {of_tile}, the patches of each tile")
    return max_patches // of_tile
