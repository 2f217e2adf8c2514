"""Prepares the images and videos of a model's prompts: `MediaProcessor`."""

import contextlib
import functools
import hashlib
import itertools
import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxllm.encoder_sizes import most_patches
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media import payload
from jaxllm.media.cache import ProcessedCache
from jaxllm.media.clips import has_pictures, open_clip
from jaxllm.media.clips import refuse as refuse_video
from jaxllm.media.expansion import embedding_runs, expand
from jaxllm.media.families import FAMILIES, Family
from jaxllm.media.families.qwen_video import QwenVideo
from jaxllm.media.image_files import check_size, load, open_image, refuse
from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.media.rgb import from_array, to_rgb
from jaxllm.media.settings import Settings, read_settings
from jaxllm.model_parts.vision import Vision
from jaxllm.request import PromptItem

HASH_BYTES = 32
VIDEOS = "videos_kwargs"
"""The key of mm_processor_kwargs for what concerns videos alone, as transformers has it."""
MAX_OVERRIDES = 64
"""Number of cached processors for mm_processor_kwargs of requests."""


def make_processor(directory: Path, vision: Vision, options: MediaOptions) -> "MediaProcessor":
    """The processor for a model directory. Raises ConfigError."""
    return MediaProcessor(vision, options, directory)


class MediaProcessor:
    """Turns images and videos into patches, and their placeholders into tokens. Thread-safe; keeps what it prepared, up to a size."""

    def __init__(self, vision: Vision, options: MediaOptions, directory: Path):
        """Raises ConfigError if the settings in the model directory or mm_processor_kwargs ask for the impossible."""
        self.vision, self.options = vision, options
        self.max_patches = most_patches(vision, options.mm_max_patches)
        self.cache = ProcessedCache(int(options.mm_processor_cache_gb * 2**30))
        kind = FAMILIES[vision.family]
        self._of_file, self._directory = read_settings(directory), directory
        self._of_video_file = read_settings(directory, "video") if kind.video else {}
        self._lock = threading.Lock()  # a script may give the same Pillow image to several prompts, which load it on first use
        self._family_of = functools.lru_cache(MAX_OVERRIDES)(self._make_family)
        self._family = self._family_of("{}")
        self._video_of = functools.lru_cache(MAX_OVERRIDES)(self._make_video)
        self._video = self._video_of("{}")

    def process(self, media: Media, mm_processor_kwargs: Mapping[str, Any] | None = None) -> ProcessedMedia:
        """Decode, orient, resize, cut into patches and hash an image or a video. Takes milliseconds of a core for each image or frame, most
        of them without the GIL.

        mm_processor_kwargs: of the request, over those of the options. Raises InvalidRequestError, whose param is the item's name.
        """
        if media.kind not in self.kinds:
            raise InvalidRequestError(
                f"{media.name} is of kind {media.kind}; this model takes text and {' and '.join(f'{kind}s' for kind in self.kinds)}",
                media.name,
            )
        overrides = self._checked(mm_processor_kwargs)
        return self._process_video(media, overrides) if media.kind == "video" else self._process_image(media, overrides)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of items that prompts may have."""
        return ("image",) if self._video is None else ("image", "video")

    def _process_image(self, media: Media, overrides: str) -> ProcessedMedia:
        family, image = self._family_of(overrides), None
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

    def _process_video(self, media: Media, overrides: str) -> ProcessedMedia:
        video = self._video_of(overrides)
        assert video is not None
        content = self._hash(video, "video", f"{self.options.video_io}".encode(), *self._video_parts(media))
        if (kept := self.cache.get(content)) is not None:
            return kept
        if media.data is None:
            refuse_video(media.name, "has a uuid and no content, and no video of that uuid is kept here; send its content")
        # A script may give the same Pillow images to several prompts, which load them on first use.
        with self._lock if has_pictures(media.data) else contextlib.nullcontext():
            processed = self._prepare_video(video, media, content)
        self.cache.put(content, processed)
        return processed

    def _prepare_video(self, video: QwenVideo, media: Media, content: bytes) -> ProcessedMedia:
        clip = open_clip(media.data, media.name, self.options, media.check)
        numbers = video.chosen(clip, media.name)
        size = video.resized(len(numbers), clip.width, clip.height)
        rows, columns = (length // self.vision.patch_size for length in size[::-1])
        merge = self.vision.merge_size
        if rows * columns > self.max_patches:
            refuse_video(
                media.name,
                f"has frames that make {rows * columns} patches, more than --mm-max-patches, {self.max_patches}; crop them",
            )
        grid, token_id = (1, rows // merge, columns // merge), self.vision.video_token_id
        assert token_id is not None
        patches = [payload.pack((1, rows, columns), step) for step in video.steps(clip.read(numbers), size)]
        labels = video.labels([clip.seconds[number] for number in numbers])
        steps = tuple(
            ProcessedMedia(
                kind="video",
                content_hash=self._digest(content, struct.pack("<4i", place, *grid)),
                token_ids=(token_id,) * (grid[1] * grid[2]),
                grid=grid,
                payload=each,
                label=label,
            )
            for place, (each, label) in enumerate(zip(patches, labels, strict=True))
        )
        token_ids = tuple(itertools.chain.from_iterable(step.token_ids for step in steps))
        return ProcessedMedia("video", content, token_ids, (len(steps), *grid[1:]), payload=b"", steps=steps)

    def _video_parts(self, media: Media) -> Iterator[bytes]:
        """Bytes that the hash of a video covers: its uuid, or its file, or the pixels of its frames and their metadata."""
        if media.uuid is not None:
            yield from (b"uuid", media.uuid.encode("utf-8", "surrogatepass"))
            return
        data, metadata = media.data, None
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
            data, metadata = data
        as_lists = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in (metadata or {}).items()
        }
        yield f"{type(data).__name__} {as_lists}".encode()
        for frame in data if isinstance(data, list | tuple) else (data,):
            if isinstance(frame, bytes):
                yield frame
            elif isinstance(frame, np.ndarray):
                yield from (f"{frame.dtype} {frame.shape}".encode(), frame.tobytes())
            elif isinstance(frame, Image.Image):
                with self._lock:
                    load(frame, media.name)
                palette = frame.palette.tobytes() if frame.palette is not None else b""
                yield from (f"{frame.mode} {frame.size} {frame.info.get('transparency')}".encode(), palette, frame.tobytes())
            else:
                yield type(frame).__name__.encode()

    def placeholder(self, kind: str = "image") -> str:
        """The text that stands for an item of a kind in a prompt of plain text."""
        return self._family.placeholder if kind == "image" or self._video is None else self._video.placeholder

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        """The text with what the family writes around each image or time step of a video, before it is tokenized. Raises
        InvalidRequestError."""
        videos = [media for media in processed if media.kind == "video"]
        if videos and self._video is not None:
            text = self._expand_videos(text, videos, self._video.placeholder)
        return self._family.expand_text(text, len(processed) - len(videos))

    def _expand_videos(self, text: str, videos: Sequence[ProcessedMedia], placeholder: str) -> str:
        """The text with a placeholder for each time step, behind its time, in place of one for each video."""
        pieces = text.split(placeholder)
        if len(pieces) - 1 != len(videos):
            return text  # which may have them already; `expand` counts
        written = ["".join(step.label + placeholder for step in video.steps) for video in videos]
        return "".join(itertools.chain(*zip(pieces, [*written, ""], strict=True)))

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        """The token ids with as many placeholders as each image has tokens, and the items at them.

        The prompt has one placeholder for each image, or all of them already. Raises InvalidRequestError for other counts.
        """
        ids_of = {"image": self.vision.image_token_id}
        if self._video is not None:
            assert self.vision.video_token_id is not None
            ids_of["video"] = self.vision.video_token_id
        return expand(ids_of, token_ids, processed, has_positions=self._family.has_positions)

    def count_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of this size in pixels."""
        return len(self._family.token_ids(width, height))

    def _checked(self, overrides: Mapping[str, Any] | None) -> str:
        """The mm_processor_kwargs of a request as JSON text."""
        if not overrides:
            return "{}"
        if not self.options.trust_request_mm_kwargs:
            raise InvalidRequestError(
                "mm_processor_kwargs of requests are not taken here; leave them out, or start with --trust-request-mm-kwargs",
                "mm_processor_kwargs",
            )
        try:
            text = json.dumps(overrides, sort_keys=True)
            self._family_of(text)
            self._video_of(text)
            return text
        except (ConfigError, TypeError, ValueError) as error:
            raise InvalidRequestError(str(error), "mm_processor_kwargs") from None

    def _make_family(self, overrides: str) -> Family:
        """By the JSON text of a request's mm_processor_kwargs. Raises ConfigError."""
        kind, given = FAMILIES[self.vision.family], self._given(overrides)
        options = kind.options if kind.video is None else (*kind.options, VIDEOS)
        settings = Settings(self._of_file, given, options)
        settings.check(kind.image_processors, self.vision, kind.sizes)
        return kind.of(self.vision, settings, self.max_patches, self._directory)

    def _make_video(self, overrides: str) -> QwenVideo | None:
        """As `_make_family`. None: the model takes no videos."""
        kind = FAMILIES[self.vision.family]
        if kind.video is None or self.vision.video_token_id is None:
            return None
        of_io = dict(self.options.video_io)
        given = self._given(overrides).get(VIDEOS) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{VIDEOS} of mm_processor_kwargs is {given!r}, must be an object")
        settings = Settings(self._of_video_file, {**of_io, **given}, kind.video.options)
        settings.check(kind.video.processors, self.vision, kind.sizes, kind="video")
        return kind.video.of(self.vision, settings, self.max_patches)

    def _given(self, overrides: str) -> dict[str, Any]:
        """mm_processor_kwargs of a request over those of the options."""
        return {**(self.options.mm_processor_kwargs or {}), **json.loads(overrides)}

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
        tiles, rows, columns = grid = family.grid(*image.size)
        merge = self.vision.merge_size
        if (count := tiles * rows * columns * merge**2) > self.max_patches:
            refuse(
                name,
                f"has {image.width} x {image.height} pixels, which make {count} patches, more than --mm-max-patches, "
                f"{self.max_patches}; crop it",
            )
        token_ids = tuple(family.token_ids(*image.size))
        return ProcessedMedia(
            kind="image",
            content_hash=self._digest(content, struct.pack("<3i", *grid)),
            token_ids=token_ids,
            grid=grid,
            payload=payload.pack((tiles, rows * merge, columns * merge), family.patches(image)),
            embedding_runs=embedding_runs(token_ids, self.vision.image_token_id),
        )

    def _hash(self, family: Family | QwenVideo, kind: str, *content: bytes) -> bytes:
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
