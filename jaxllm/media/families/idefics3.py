"""Idefics 3 and SmolVLM: images are enlarged to whole tiles; see Idefics3ImageProcessor and Idefics3Processor in transformers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from PIL import Image

from jaxllm.log import info_once
from jaxllm.media.families.tiles import Tiled, most_tiles, with_whole
from jaxllm.media.families.tokens import encoder
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision

AROUND, WHOLE, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
MAX_SIDE = 4096
"""Pixels along the longest side, whatever the settings say."""


@dataclass(frozen=True)
class Idefics3(Tiled):
    """Images are resized until their longest side has a given length, then to whole tiles. Text says where each tile lies."""

    image_processors: ClassVar = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    options: ClassVar = ("size", "resample", "do_image_splitting")
    placeholder: ClassVar = IMAGE
    sizes: ClassVar = ()

    max_tiles: int
    """Most tiles of an image, the whole image included."""
    longest_edge: int
    splits: bool
    """Whether an image gets several tiles."""
    encode: Callable[[str], tuple[int, ...]] = field(compare=False, repr=False)
    """The tokens of a text."""

    @classmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int, directory: Path) -> Self:
        grid, patch = vision.position_grid, vision.patch_size
        side = settings.sizes("max_image_size", "longest_edge").get("longest_edge", grid * patch)
        if side // patch != grid:
            settings.fault(
                f"max_image_size is {side}, must make {grid} patches of {patch} pixels, for which the encoder has positions"
            )
        longest = settings.sizes("size", "longest_edge").get("longest_edge", 4 * side)
        tiles, splits = most_tiles(vision, settings, max_patches), settings.boolean("do_image_splitting", True)
        if splits and with_whole(math.ceil(min(longest, MAX_SIDE) / side) ** 2) > tiles:
            info_once(f"images get at most {tiles} tiles, some fewer than the model takes: raise --mm-max-patches for more")
        encode = encoder(directory / "tokenizer.json")
        if encode(IMAGE) != (vision.image_token_id,) or len(encode(AROUND)) > 1:
            settings.fault(
                f"the tokenizer in {directory} must have the tokens {AROUND} and {IMAGE}, the latter as {vision.image_token_id}"
            )
        return cls(vision, settings.resample(Image.Resampling.LANCZOS), side, tiles, longest, splits, encode)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        return self._sizes(width, height)[1]

    def cut(self, image: Image.Image) -> list[Image.Image]:
        for size in self._sizes(*image.size):
            image = image.resize(size, self.resample)
        tiles = self.tiles_of(image)
        return tiles if len(tiles) == 1 else [*tiles, image.resize((self.side, self.side), self.resample)]

    def token_ids(self, width: int, height: int) -> list[int]:
        rows, columns = self.rows_and_columns(width, height)
        texts = [
            f"{chr(10) * (row > 0 and column == 0)}{AROUND}<row_{row + 1}_col_{column + 1}>"
            for row in range(rows)
            for column in range(columns)
        ]
        texts = [f"{AROUND}{WHOLE}"] if len(texts) == 1 else [*texts, f"\n\n{AROUND}{WHOLE}"]
        embeddings = [self.vision.image_token_id] * (self.vision.position_grid // self.vision.merge_size) ** 2
        return [*(token for text in texts for token in (*self.encode(text), *embeddings)), *self.encode(AROUND)]

    def _sizes(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The sizes that an image is resized to, one after the other: the first keeps its shape, the second has whole tiles."""
        if not self.splits:
            return self._with_longest(width, height, self.longest_edge), (self.side, self.side)
        # Lengths above MAX_SIDE all make the same size.
        needless = max(0, self.longest_edge - MAX_SIDE) // self.side * self.side
        lengths = (self.longest_edge, *range(self.longest_edge - needless, 0, -self.side))
        firsts = (self._with_longest(width, height, longest) for longest in lengths)
        sizes = ((first, self._whole_tiles(*first)) for first in firsts)
        return next((first, second) for first, second in sizes if self._are_few_enough(*second))

    def _with_longest(self, width: int, height: int, longest: int) -> tuple[int, int]:
        """Another size of the same shape, whose shorter side is even."""
        ratio = width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            width, height = int(longest * ratio), longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        if max(width, height) <= MAX_SIDE:
            return width, height
        ratio = width / height
        if width >= height:
            return MAX_SIDE, max(1, int(MAX_SIDE / ratio))
        return max(1, int(MAX_SIDE * ratio)), MAX_SIDE

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """The next larger size with whole tiles, first along the longer side."""
        ratio = width / height
        if width >= height:
            width = self._rounded_up(width)
            return width, self._rounded_up(int(width / ratio))
        height = self._rounded_up(height)
        return self._rounded_up(int(height * ratio)), height

    def _are_few_enough(self, width: int, height: int) -> bool:
        return with_whole(width * height // self.side**2) <= self.max_tiles

    def _rounded_up(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side
