"""Adds random images to the prompts of a load test, sized and counted as vLLM's dataset random-mm does."""

import ast
import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.http_client.datasets import LoadPrompt

Size = tuple[int, int]
"""Height and width in pixels."""
DEFAULT_SIZES: Mapping[Size, float] = {(256, 256): 0.5, (720, 1280): 0.5}


@dataclass(frozen=True)
class ImageMix:
    """How many images a request has, and of which sizes."""

    base_items: int = 1
    range_ratio: float = 0.0
    """The number of images is uniform in [base·(1-ratio), base·(1+ratio)]."""
    max_items: int = 255
    sizes: Mapping[Size, float] = field(default_factory=lambda: dict(DEFAULT_SIZES))
    """Relative probability of each size."""

    def counts(self, rng: np.random.Generator, num_prompts: int) -> list[int]:
        """The number of images of each prompt. Raises ConfigError if each would have more than `max_items`."""
        low = math.floor(self.base_items * (1 - self.range_ratio))
        high = min(math.ceil(self.base_items * (1 + self.range_ratio)), self.max_items)
        if low > high:
            raise ConfigError(
                f"requests have at least {low} images, but --random-mm-limit-mm-per-prompt allows {self.max_items}; raise it or "
                "lower --random-mm-base-items-per-request"
            )
        return rng.integers(low, high + 1, num_prompts).tolist()


def with_images(prompts: Sequence[LoadPrompt], mix: ImageMix, rng: np.random.Generator) -> list[LoadPrompt]:
    """The text prompts as chat messages, each with its images behind the text, as data URLs of JPEG noise.

    Noise compresses worst, so such requests are larger than those with photos.
    """
    sizes = list(mix.sizes)
    weights = np.array([mix.sizes[size] for size in sizes], float)
    found = []
    for prompt, count in zip(prompts, mix.counts(rng, len(prompts)), strict=True):
        chosen = [sizes[place] for place in rng.choice(len(sizes), count, p=weights / weights.sum())]
        parts: list[dict[str, Any]] = [{"type": "text", "text": prompt.prompt}]
        parts += [{"type": "image_url", "image_url": {"url": _image(size, rng)}} for size in chosen]
        # Only the server can count the tokens of images.
        found.append(replace(prompt, prompt=[{"role": "user", "content": parts}], num_prompt_tokens=None))
    return found


def _image(size: Size, rng: np.random.Generator) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def read_sizes(text: str) -> dict[Size, float]:
    """vLLM's --random-mm-bucket-config: a Python dict of (height, width, frames) to how likely it is. Raises ValueError."""
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        given = None
    if not isinstance(given, dict) or not all(_is_bucket(key, value) for key, value in given.items()):
        raise ValueError(f"{text!r} must be a dict of (height, width, frames) to a probability, such as {{(256, 256, 1): 1.0}}")
    if any(value and frames > 1 for (_, _, frames), value in given.items()):
        raise ValueError(
            f"{text!r} asks for videos; models see images, so frames must be 1 wherever the probability is above 0"
        )
    sizes = {(height, width): float(value) for (height, width, frames), value in given.items() if value and frames == 1}
    if not sizes:
        raise ValueError(f"{text!r} has no size whose probability is above 0")
    return sizes


def _is_bucket(key: Any, value: Any) -> bool:
    is_size = isinstance(key, tuple) and len(key) == 3 and all(type(part) is int and part > 0 for part in key)
    return is_size and isinstance(value, (int, float)) and 0 <= value < math.inf


def read_limit(limits: Mapping[str, Any]) -> int:
    """The images in vLLM's --random-mm-limit-mm-per-prompt. Raises ValueError."""
    limit = limits.get("image", ImageMix.max_items)
    if set(limits) - {"image", "video"} or type(limit) is not int or limit < 0:
        raise ValueError(f'{dict(limits)!r} must be such as {{"image": 4}}')
    return limit
