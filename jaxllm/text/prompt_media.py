"""The images or audio of prompts, between a caller and the engine: checked, prepared in threads, and put at their placeholders."""

import numbers
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media, MediaOptions, ProcessedMedia
from jaxllm.metrics.buckets import PHASE_SECONDS
from jaxllm.observations import Observations
from jaxllm.request import PromptItem

if TYPE_CHECKING:
    from jaxllm.media.audio import AudioProcessor
    from jaxllm.media.processor import MediaProcessor  # imports Pillow

IMAGE, AUDIO = "image", "audio"
DATA, UUIDS, KWARGS = KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of a prompt, as vLLM has them."""
MAX_THREADS = 4
"""Images or clips prepared at once; each takes tens of milliseconds, mostly without the interpreter's lock."""


class PromptMedia:
    """Prepares the images or the audio of prompts for one model. Thread-safe. Errors are InvalidRequestErrors."""

    def __init__(self, processor: "MediaProcessor | AudioProcessor | None", options: MediaOptions, model: str):
        """`processor`: None for a model that takes text alone."""
        self._processor, self._options, self._model = processor, options, model
        self._kind = IMAGE if processor is None else processor.kind
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "jaxllm-images")
        self.seconds = Observations(PHASE_SECONDS)
        """How long each image took."""
        self._lock = threading.Lock()

    @property
    def sees_images(self) -> bool:
        """Whether the model takes images."""
        return self._processor is not None and self._kind == IMAGE

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of items that the model takes."""
        return () if self._processor is None else (self._kind,)

    @property
    def hearing(self) -> "AudioProcessor | None":
        """What prepares audio; None: the model does not hear."""
        return self._processor if self._kind == AUDIO else None  # type: ignore[return-value]

    def check_count(self, count: int, param: str = "prompt", kind: str = IMAGE) -> None:
        """Check the number of images, or of items of another kind, of a prompt before they are read. `param`: what errors call them."""
        if count and (self._processor is None or self._kind != kind):
            takes, items = "text alone" if self._processor is None else self._kind, "images" if kind == IMAGE else kind
            raise InvalidRequestError(
                f"{self._model} takes {takes}, and no {items}; leave them out, or serve a model that does", param
            )
        self._options.check_count(count, kind, param)

    def check_trusted(self, kwargs: Mapping[str, Any] | None, param: str = KWARGS) -> None:
        """Check whether a client may set how images are prepared. For servers; scripts may."""
        if kwargs and not self._options.trust_request_mm_kwargs:
            raise InvalidRequestError(
                f"{param} of requests is refused; the server takes it with --trust-request-mm-kwargs", param
            )

    def image_texts(self, count: int) -> list[str]:
        """What stands for each image in prompts of plain text."""
        return [] if self._processor is None else [self._processor.placeholder(number) for number in range(1, count + 1)]

    def submit(self, prompt: Any) -> "list[Future[ProcessedMedia]]":
        """Prepare the images of a prompt in threads. Prompts without any need none."""
        return self.process(*self._read(prompt))

    def process(
        self, media: Sequence[Media | ProcessedMedia], kwargs: Mapping[str, Any] | None = None
    ) -> "list[Future[ProcessedMedia]]":
        """Prepare images, whose number `check_count` has checked, in threads. kwargs: mm_processor_kwargs of the prompt."""
        return [self._submit(each, kwargs) for each in media]

    def prepared(self, prompts: Sequence[Any]) -> list[Any]:
        """The prompts with their images prepared, all at once. Invalid ones stay unchanged."""
        submitted: list[list[Future[ProcessedMedia]]] = []
        for prompt in prompts:
            try:
                submitted.append(self.submit(prompt))
            except InvalidRequestError:
                submitted.append([])
        return [_done(prompt, images) for prompt, images in zip(prompts, submitted, strict=True)]

    def _submit(self, media: Media | ProcessedMedia, kwargs: Mapping[str, Any] | None) -> "Future[ProcessedMedia]":
        if isinstance(media, ProcessedMedia):
            done: Future[ProcessedMedia] = Future()
            done.set_result(media)
            return done
        return self._threads.submit(self._prepare, media, kwargs)

    def _prepare(self, media: Media, kwargs: Mapping[str, Any] | None) -> ProcessedMedia:
        assert self._processor is not None, "check_count refuses images"
        began = time.perf_counter()
        processed = self._processor.process(media, kwargs)
        with self._lock:
            self.seconds.add(time.perf_counter() - began)
        return processed

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        """A prompt's text with what the model's family writes around images."""
        return text if self._processor is None else self._processor.expand_text(text, processed)

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        """A prompt's token ids with a placeholder for each token of its images, and the items at them.

        The ids have one placeholder for each image, or all of them already.
        """
        return (token_ids, ()) if self._processor is None else self._processor.expand(token_ids, processed)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, prompt: Any) -> tuple[list[Media | ProcessedMedia], Mapping[str, Any] | None]:
        """The images of a prompt and how to prepare them."""
        if not isinstance(prompt, Mapping):
            return [], None
        data, uuids, kwargs = (prompt.get(key) for key in KEYS)
        for key, value in ((DATA, data), (UUIDS, uuids), (KWARGS, kwargs)):
            if value is not None and not isinstance(value, Mapping):
                raise InvalidRequestError(f"{key} is a {type(value).__name__}, must be an object", key)
        own = self._kind
        for key, value in ((DATA, data), (UUIDS, uuids)):
            if other := next((kind for kind in value or () if kind != own), None):
                taken = "audio" if own == AUDIO else "images"
                raise InvalidRequestError(f"{key} has {other!r}, must have {own} alone: this model takes text and {taken}", key)
        images, names = _as_list((data or {}).get(own)), _as_list((uuids or {}).get(own))
        if not images and names:
            images = [None] * len(names)
        if names and len(names) != len(images):
            raise InvalidRequestError(
                f"{UUIDS} has {len(names)} for {len(images)} {own}{'s' if own == IMAGE else ' clips'}; give one each, or None",
                UUIDS,
            )
        self.check_count(len(images), DATA, own)
        names = names or [None] * len(images)
        return [_as_media(own, each, names[place], f"{DATA}.{own}[{place}]") for place, each in enumerate(images)], kwargs


def with_processed(prompt: Any, processed: Sequence[ProcessedMedia]) -> Any:
    """The prompt with these in place of its images."""
    if not processed:
        return prompt
    return {**{key: value for key, value in prompt.items() if key not in KEYS}, DATA: {processed[0].kind: list(processed)}}


def processed_in(prompt: Any) -> list[ProcessedMedia] | None:
    """The images of a prompt whose images are prepared; None: they are not."""
    data = prompt.get(DATA) if isinstance(prompt, Mapping) else None
    if not data:
        return []
    items = next(iter(data.values())) if isinstance(data, Mapping) else None
    return items if isinstance(items, list) and all(isinstance(item, ProcessedMedia) for item in items) else None


def _done(prompt: Any, images: "Sequence[Future[ProcessedMedia]]") -> Any:
    try:
        return with_processed(prompt, [image.result() for image in images])
    except InvalidRequestError:
        return prompt


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], numbers.Integral):
        return [value]  # samples and their rate
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _as_media(kind: str, image: Any, uuid: Any, name: str) -> Media | ProcessedMedia:
    if uuid is not None and not isinstance(uuid, str):
        raise InvalidRequestError(f"{UUIDS} has {uuid!r}, must have strings", UUIDS)
    if isinstance(image, (Media, ProcessedMedia)):
        return image
    if image is None and uuid is None:
        raise InvalidRequestError(
            f"{name} is None; give {'an image' if kind == IMAGE else kind}, or the uuid of one that was sent before", name
        )
    if isinstance(image, str):
        raise InvalidRequestError(
            f"{name} is a string; give its bytes, a Pillow image or an array"
            + (", or send an address in a chat" if kind == IMAGE else ""),
            name,
        )
    return Media(kind, bytes(image) if isinstance(image, (bytearray, memoryview)) else image, uuid, name)
