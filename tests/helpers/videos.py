"""Videos for tests, their patches as transformers orders them, and what it computes of them: tests/goldens/qwen3_vl/video.json."""

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.model_parts import Vision
from tests.helpers.goldens import FOLDER

PATH = FOLDER / "qwen3_vl" / "video.json"
VIDEO, IMAGE = "<|vision_start|><|video_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"see {VIDEO} and {IMAGE}: what?"


@dataclass(frozen=True)
class Golden:
    checkpoint: dict[str, Any]
    """Arguments of `vision_checkpoint.write`."""
    video: list[int]
    """Seed, frames, height and width."""
    fps: float
    picture: list[int]
    """Seed, height and width."""
    features: list[list[float]]
    """What the encoder makes of the video."""
    prompt: list[int]
    """The tokens of PROMPT, with a placeholder for each embedding."""
    prompt_logprobs: list[float]
    tokens: list[int]
    logprobs: list[float]


@functools.cache
def golden() -> Golden:
    values = json.loads(PATH.read_text(encoding="utf-8"))
    return Golden(**{name: value for name, value in values.items() if name != "versions"})


def frames(seed: int, count: int, height: int, width: int) -> np.ndarray:
    """Random pixels, uint8 [frames, height, width, 3]."""
    return np.random.RandomState(seed).randint(0, 256, (count, height, width, 3)).astype(np.uint8)


def patches(video: np.ndarray, vision: Vision) -> tuple[tuple[int, int, int], np.ndarray]:
    """The grid of patches of a video whose sides are whole cells, and the patches, uint8 [N, 3 · frames · patch_size²], cell by cell: of
    each colour the pixels of all frames of a patch, as transformers orders them."""
    size, merge, step = vision.patch_size, vision.merge_size, vision.temporal_patch_size
    video = np.concatenate([video, np.repeat(video[-1:], -len(video) % step, axis=0)])
    t, h, w = len(video) // step, video.shape[1] // size, video.shape[2] // size
    cells = video.reshape(t, step, h // merge, merge, size, w // merge, merge, size, 3)
    return (t, h, w), cells.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, 3 * step * size**2)


def in_order_of_frames(patches_NC: np.ndarray, vision: Vision) -> np.ndarray:
    """Such patches as an encoder takes them here: of each frame the pixels of all colours."""
    values = patches_NC.reshape(len(patches_NC), 3, vision.temporal_patch_size, -1)
    return values.swapaxes(1, 2).reshape(patches_NC.shape)
