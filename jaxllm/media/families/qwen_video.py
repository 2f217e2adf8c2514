"""Qwen3-VL's videos: which frames are taken, their size, and the text before them; see Qwen3VLVideoProcessor in transformers."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from jaxllm.media.clips import Clip, refuse
from jaxllm.media.patches import to_patches
from jaxllm.media.settings import Settings
from jaxllm.model_parts.vision import Vision


@dataclass(frozen=True)
class QwenVideo:
    """Frames are taken at a rate and get the same size, so that all together have an area. As many as a patch has make a time step, which
    stands in the prompt like an image, behind the time at which it is shown."""

    processors: ClassVar = ("Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor")
    options: ClassVar = (
        *("min_pixels", "max_pixels", "size", "resample", "fps", "num_frames", "min_frames", "max_frames", "do_sample_frames"),
    )
    placeholder: ClassVar = "<|vision_start|><|video_pad|><|vision_end|>"

    vision: Vision
    resample: Image.Resampling
    min_pixels: int
    max_pixels: int
    """Of all frames together."""
    fps: float
    num_frames: int | None
    """How many frames are taken, whatever their rate."""
    min_frames: int
    max_frames: int
    samples: bool
    """Whether frames are taken at a rate; else all are."""
    max_step_pixels: int
    """Of a frame."""

    @classmethod
    def of(cls, vision: Vision, settings: Settings, max_patches: int) -> Self:
        """By the settings of a checkpoint. Raises ConfigError."""
        size = settings.sizes("size", "shortest_edge", "longest_edge", "min_pixels", "max_pixels")  # which hold areas here
        low = settings.integer("min_pixels", size.get("shortest_edge", size.get("min_pixels", 128 * 32 * 32)))
        high = settings.integer("max_pixels", size.get("longest_edge", size.get("max_pixels", 768 * 32 * 32)))
        if low > high:
            settings.fault(f"min_pixels of videos is {low}, more than max_pixels, {high}; lower it")
        return cls(
            vision,
            settings.resample(Image.Resampling.BICUBIC),
            low,
            high,
            settings.number("fps", 2),
            settings.integer("num_frames", None) if settings.has("num_frames") else None,
            settings.integer("min_frames", 4),
            settings.integer("max_frames", 768),
            settings.boolean("do_sample_frames", True),
            max_patches * vision.patch_size**2,
        )

    def chosen(self, clip: Clip, name: str) -> Sequence[int]:
        """The numbers of the frames that are taken. Raises InvalidRequestError."""
        total, least = len(clip.seconds), self.vision.temporal_patch_size
        if clip.is_chosen or not self.samples:
            numbers: Sequence[int] = range(total)
        else:
            wanted = self.num_frames
            if wanted is None:
                wanted = min(max(int(total / clip.fps * self.fps), self.min_frames), self.max_frames)
            numbers = np.linspace(0, total - 1, min(wanted, total)).round().astype(int).tolist()
        if len(numbers) < least:
            refuse(name, f"has {len(numbers)} frame(s), must have at least {least}; send a still as an image")
        if len(numbers) > self.max_frames:
            refuse(name, f"has {len(numbers)} frames, must have at most {self.max_frames}; send fewer of them")
        return numbers

    def resized(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Width and height, in pixels, that frames are resized to."""
        side, step = self.vision.patch_size * self.vision.merge_size, self.vision.temporal_patch_size
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        new_width, new_height = round(width / side) * side, round(height / side) * side
        area = round(num_frames / step) * step * new_width * new_height
        if area > self.max_pixels:
            new_width, new_height = shrunk(width, height, side, math.sqrt(num_frames * width * height / self.max_pixels))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (num_frames * width * height))
            new_width, new_height = math.ceil(width * grow / side) * side, math.ceil(height * grow / side) * side
        if new_width * new_height > self.max_step_pixels:
            new_width, new_height = shrunk(width, height, side, math.sqrt(width * height / self.max_step_pixels))
        return new_width, new_height

    def steps(self, frames: Iterable[Image.Image], size: tuple[int, int]) -> Iterator[np.ndarray]:
        """The patches of each time step, uint8 [patches, frames of a patch · 3 · patch_size²], of frames that get this size; the last frame
        fills up the last step."""
        patches = (
            to_patches(
                frame if frame.size == size else frame.resize(size, self.resample),
                self.vision.patch_size,
                self.vision.merge_size,
            )
            for frame in frames
        )
        for step in _batched(patches, self.vision.temporal_patch_size):
            missing = self.vision.temporal_patch_size - len(step)
            yield np.concatenate([*step, *[step[-1]] * missing], axis=1)

    def labels(self, seconds: Sequence[float]) -> Iterator[str]:
        """The text before each time step of frames that are shown at these times."""
        for step in _batched(seconds, self.vision.temporal_patch_size):
            yield f"<{(step[0] + step[-1]) / 2:.1f} seconds>"

    def as_json(self) -> Mapping[str, Any]:
        """All that shapes the patches of a video, and the text around them: part of the hash of its content."""
        return {name: value for name, value in vars(self).items() if name != "vision"} | {
            "patch_size": self.vision.patch_size,
            "merge_size": self.vision.merge_size,
            "temporal_patch_size": self.vision.temporal_patch_size,
            "family": self.vision.family,
        }


def shrunk(width: int, height: int, side: int, shrink: float) -> tuple[int, int]:
    """Width and height divided by `shrink`, in whole sides, at least one."""
    return max(side, math.floor(width / shrink / side) * side), max(side, math.floor(height / shrink / side) * side)


def _batched(values: Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """Tuples of so many values one after the other; the last may have fewer."""
    rest = iter(values)
    while batch := tuple(itertools.islice(rest, count)):
        yield batch
