"""Prepares the images of a model's prompts: `MediaProcessor`."""

import contextlib
import functools
import hashlib
import json
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media import payload
from jaxllm.media.cache import ProcessedCache
from jaxllm.media.expansion import expand
from jaxllm.media.families import FAMILIES, Family
from jaxllm.media.image_files import check_size, load, open_image, refuse
from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.media.rgb import from_array, to_rgb
from jaxllm.media.settings import Settings, read_settings
from jaxllm.model_parts.vision import Vision
from jaxllm.request import PromptItem

HASH_BYTES = 32
MAX_OVERRIDES = 64
"""Different mm_processor_kwargs of requests that are kept ready."""


def make_processor(directory: Path, vision: Vision, options: MediaOptions) -> "MediaProcessor":
    """By the files in a model directory. Raises ConfigError."""
    return MediaProcessor(vision, options, read_settings(directory), directory)


class MediaProcessor:
    """Turns images into patches, and their placeholders into tokens. Thread-safe; keeps what it prepared, up to a size."""

    kind = "image"

    def __init__(self, vision: Vision, options: MediaOptions, of_file: Mapping[str, Any], directory: Path):
        """`of_file`: the settings in the model directory. Raises ConfigError if they or mm_processor_kwargs ask for the impossible."""
        self.vision, self.options = vision, options
        self.cache = ProcessedCache(int(options.mm_processor_cache_gb * 2**30))
        self._of_file, self._directory = of_file, directory
        self._lock = threading.Lock()  # a script may give the same Pillow image to several prompts, which load it on first use
        self._family_of = functools.lru_cache(MAX_OVERRIDES)(self._make_family)
        self._family = self._family_of("{}")

    def process(self, media: Media, mm_processor_kwargs: Mapping[str, Any] | None = None) -> ProcessedMedia:
        """Decode, orient, resize, cut into patches and hash an image. Takes milliseconds of a core, most of them without the GIL.

        mm_processor_kwargs: of the request, over those of the options. Raises InvalidRequestError, whose param is the item's name.
        """
        if media.kind != "image":
            raise InvalidRequestError(f"{media.name} is of kind {media.kind}; this model takes text and images", media.name)
        family = self._with(mm_processor_kwargs)
        image = None
        if media.uuid is not None:
            content = self._hash(family, "uuid", media.uuid.encode("utf-8", "surrogatepass"))
        elif isinstance(media.data, bytes):
            content = self._hash(family, "file", media.data)
        else:
            image = self._decode(media)  # whose hash is that of its pixels, so that Pillow's ways to store them do not matter
            content = self._hash(family, "pixels", f"{image.mode} {image.size}".encode(), image.tobytes())
        if (kept := self.cache.get(content)) is not None:
            return kept
        processed = self._prepare(family, self._decode(media) if image is None else image, content, media.name)
        self.cache.put(content, processed)
        return processed

    def placeholder(self, number: int) -> str:
        """The text that stands for image `number`, from 1, in a prompt of plain text."""
        return self._family.placeholder

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        """The text with what the family writes around each image, before it is tokenized. Raises InvalidRequestError."""
        return self._family.expand_text(text, len(processed))

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        """The token ids with as many placeholders as each image has tokens, and the items at them.

        The prompt has one placeholder for each image, or all of them already. Raises InvalidRequestError for other counts.
        """
        return expand(self._family, token_ids, processed)

    def count_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of this size in pixels."""
        return len(self._family.token_ids(*self._family.grid(width, height)))

    def _with(self, overrides: Mapping[str, Any] | None) -> Family:
        """The family's preparation under the mm_processor_kwargs of a request."""
        if not overrides:
            return self._family
        if not self.options.trust_request_mm_kwargs:
            raise InvalidRequestError(
                "mm_processor_kwargs of requests are not taken here; leave them out, or start with --trust-request-mm-kwargs",
                "mm_processor_kwargs",
            )
        try:
            return self._family_of(json.dumps(overrides, sort_keys=True))
        except (ConfigError, TypeError, ValueError) as error:
            raise InvalidRequestError(str(error), "mm_processor_kwargs") from None

    def _make_family(self, overrides: str) -> Family:
        """By the JSON text of a request's mm_processor_kwargs. Raises ConfigError."""
        kind = FAMILIES[self.vision.family]
        given = {**(self.options.mm_processor_kwargs or {}), **json.loads(overrides)}
        settings = Settings(self._of_file, given, kind.options)
        settings.check(kind.image_processors, kind.mean, kind.std, {name: getattr(self.vision, name) for name in kind.sizes})
        return kind.of(self.vision, settings, self.options.mm_max_patches, self._directory)

    def _decode(self, media: Media) -> Image.Image:
        """An image in RGB, the right way up."""
        data, name = media.data, media.name
        if isinstance(data, bytes):
            image = open_image(data, name, self.options)
        elif isinstance(data, np.ndarray):
            image = from_array(data, name)
        elif isinstance(data, Image.Image):
            image = data
        elif data is None:
            refuse(name, "has a uuid and no content, and no image of that uuid is kept here; send its content")
        else:
            refuse(name, f"is a {type(data).__name__}, must be the bytes of a file, a Pillow image, or an array of uint8")
        check_size(*image.size, name, self.options)
        with self._lock if image is data else contextlib.nullcontext():
            load(image, name)
        check_size(*image.size, name, self.options)  # readers may learn of another size while they decode
        return to_rgb(image, name, self.options.background)

    def _prepare(self, family: Family, image: Image.Image, content: bytes, name: str) -> ProcessedMedia:
        rows, columns = family.grid(*image.size)
        merge = self.vision.merge_size
        if (count := rows * columns * merge**2) > self.options.mm_max_patches:
            refuse(
                name,
                f"has {image.width} x {image.height} pixels, which make {count} patches, more than --mm-max-patches, "
                f"{self.options.mm_max_patches}; crop it",
            )
        grid = (1, rows, columns)
        return ProcessedMedia(
            kind="image",
            content_hash=self._digest(content, struct.pack("<3i", *grid)),
            num_tokens=len(family.token_ids(rows, columns)),
            grid=grid,
            payload=payload.pack((1, rows * merge, columns * merge), family.patches(image)),
            embedding_runs=family.embedding_runs(rows, columns),
        )

    def _hash(self, family: Family, kind: str, *content: bytes) -> bytes:
        """The hash of content, with how it came and all settings that shape its patches."""
        settings = {**family.as_json(), "background": self.options.background, "kind": kind}
        return self._digest(json.dumps(settings, sort_keys=True).encode(), *content)

    def _digest(self, *parts: bytes) -> bytes:
        """32 bytes that differ where any part differs: lengths are hashed too."""
        digest = hashlib.new(self.options.mm_hasher_algorithm)
        for part in parts:
            digest.update(struct.pack("<q", len(part)))
            digest.update(part)
        return digest.digest()[:HASH_BYTES]
