"""The images, videos and audio of prompts, between a caller and the engine: checked, prepared in threads, and put at their placeholders."""

import numbers
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media, MediaOptions, ProcessedMedia
from jaxllm.media.media import MediaUnwantedError
from jaxllm.metrics.media_counts import MediaCounts
from jaxllm.request import PromptItem
from jaxllm.text.chat_media import MANY, A

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.media.audio import AudioProcessor
    from jaxllm.media.processor import MediaProcessor  # imports Pillow
    from jaxllm.media.speech import SpeechProcessor

KINDS = ("image", "video", "audio")
DATA, UUIDS, KWARGS = KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of a prompt, as vLLM has them."""
MAX_THREADS = 4
"""Images prepared at once; each takes tens of milliseconds, mostly without the interpreter's lock."""


class _Preparation(Future[ProcessedMedia]):
    """The preparation of an item in a thread. Cancelling it ends it at the next frame of a video if it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self._is_unwanted = threading.Event()

    def cancel(self) -> bool:
        self._is_unwanted.set()
        return super().cancel()

    def check(self) -> None:
        """Raise MediaUnwantedError after `cancel`."""
        if self._is_unwanted.is_set():
            raise MediaUnwantedError

    def run(self, prepare: Callable[[], ProcessedMedia]) -> None:
        """Prepare, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(prepare())
        except BaseException as error:
            self.set_exception(error)


class PromptMedia:
    """Prepares the images of prompts for one model. Thread-safe. Errors are InvalidRequestErrors."""

    def __init__(self, processor: "MediaProcessor | AudioProcessor | None", options: MediaOptions):
        """`processor`: None for a model that takes text alone."""
        self._processor, self._options = processor, options
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "jaxllm-images")
        self._unfinished: weakref.WeakSet[_Preparation] = weakref.WeakSet()
        self.counts = MediaCounts()

    @property
    def sees_images(self) -> bool:
        """Whether the model takes images."""
        return "image" in self.kinds

    @property
    def speech(self) -> "SpeechProcessor | None":
        """Preprocessor of a model that writes down speech; None: the model is another."""
        return self._processor if getattr(self._processor, "transcribes", False) else None  # type: ignore[return-value]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of items that the model takes."""
        return () if self._processor is None else self._processor.kinds

    def check_count(self, kinds: Sequence[str], param: str = "prompt") -> None:
        """Check the kinds of a prompt's items, and how many there are, before they are read. `param`: what errors call them."""
        for kind in sorted({*kinds}):
            if kind not in self.kinds:
                takes = "takes text alone, and" if self._processor is None else "takes"
                raise InvalidRequestError(
                    f"this model {takes} no {MANY[kind]}; leave them out, or serve a model that does", param
                )
            self._options.check_count(kinds.count(kind), kind, param)

    def check_trusted(self, kwargs: Mapping[str, Any] | None, param: str = KWARGS) -> None:
        """Check whether a client may set how images are prepared. For servers; scripts may."""
        if kwargs and not self._options.trust_request_mm_kwargs:
            raise InvalidRequestError(
                f"{param} of requests is refused; the server takes it with --trust-request-mm-kwargs", param
            )

    def placeholders(self, kinds: Sequence[str]) -> list[str]:
        """Placeholders of items of these kinds in prompts of plain text."""
        return [] if self._processor is None else [self._processor.placeholder(kind) for kind in kinds]

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

    def check(self, prompt: Any) -> None:
        """Check the form and the number of a prompt's items, before they are read."""
        self._read(prompt)

    def samples(self, media: Media) -> "Future[np.ndarray]":
        """Decode audio of any length in a thread, for a model that writes down speech: see SpeechProcessor."""
        assert self.speech is not None, "this model writes down no speech"
        return self._threads.submit(self.speech.samples, media)

    def _submit(self, media: Media | ProcessedMedia, kwargs: Mapping[str, Any] | None) -> "Future[ProcessedMedia]":
        if isinstance(media, ProcessedMedia):
            done: Future[ProcessedMedia] = Future()
            done.set_result(media)
            return done
        preparation = _Preparation()
        queued = self._threads.submit(preparation.run, lambda: self._prepare(replace(media, check=preparation.check), kwargs))
        queued.add_done_callback(lambda queued: queued.cancelled() and preparation.cancel())
        self._unfinished.add(preparation)
        return preparation

    def _prepare(self, media: Media, kwargs: Mapping[str, Any] | None) -> ProcessedMedia:
        assert self._processor is not None, "check_count refuses images"
        began = time.perf_counter()
        processed = self._processor.process(media, kwargs)
        self.counts.add_item(media.kind, time.perf_counter() - began)
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
        """End the threads, in the middle of a video too."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for preparation in [*self._unfinished]:
            preparation.cancel()

    def _read(self, prompt: Any) -> tuple[list[Media | ProcessedMedia], Mapping[str, Any] | None]:
        """The images of a prompt and how to prepare them."""
        if not isinstance(prompt, Mapping):
            return [], None
        data, uuids, kwargs = (prompt.get(key) for key in KEYS)
        if data is None and uuids is None and kwargs is None:
            return [], None
        for key, value in ((DATA, data), (UUIDS, uuids), (KWARGS, kwargs)):
            if value is not None and not isinstance(value, Mapping):
                raise InvalidRequestError(f"{key} is a {type(value).__name__}, must be an object", key)
        for key, value in ((DATA, data), (UUIDS, uuids)):
            if other := next((kind for kind in value or () if kind not in KINDS), None):
                raise InvalidRequestError(f"{key} has {other!r}, must have {' or '.join(KINDS)}", key)
        found = [each for kind in KINDS for each in self._read_kind(kind, (data or {}).get(kind), (uuids or {}).get(kind))]
        return found, kwargs

    def _read_kind(self, kind: str, data: Any, uuids: Any) -> list[Media | ProcessedMedia]:
        """The items of a kind."""
        items, names = _LISTS[kind](data), _as_list(uuids)
        if not items and names:
            items = [None] * len(names)
        if names and len(names) != len(items):
            raise InvalidRequestError(f"{UUIDS} has {len(names)} for {len(items)} {MANY[kind]}; give one each, or None", UUIDS)
        self.check_count([kind] * len(items), DATA)
        names = names or [None] * len(items)
        return [_as_media(kind, item, names[place], f"{DATA}.{kind}[{place}]") for place, item in enumerate(items)]


def has_unprepared(prompt: Any) -> bool:
    """Whether a prompt has items that are to be prepared."""
    return isinstance(prompt, Mapping) and bool(prompt.get(DATA) or prompt.get(UUIDS)) and not processed_in(prompt)


def with_processed(prompt: Any, processed: Sequence[ProcessedMedia]) -> Any:
    """The prompt with these in place of its images and videos."""
    if not processed:
        return prompt
    return {**{key: value for key, value in prompt.items() if key not in KEYS}, DATA: by_kind(processed)}


def by_kind(items: "Sequence[Media | ProcessedMedia]") -> dict[str, list[Any]]:
    """Items as `multi_modal_data` has them."""
    return {kind: found for kind in KINDS if (found := [item for item in items if item.kind == kind])}


def processed_in(prompt: Any) -> list[ProcessedMedia] | None:
    """The images of a prompt whose images are prepared; None: they are not."""
    data = prompt.get(DATA) if isinstance(prompt, Mapping) else None
    if not data:
        return []
    if not isinstance(data, Mapping):
        return None
    items: list[Any] = []
    for kind in KINDS:
        of_kind = [] if data.get(kind) is None else data[kind]
        if not isinstance(of_kind, list) or not all(isinstance(item, ProcessedMedia) for item in of_kind):
            return None
        items += of_kind
    return items


def _done(prompt: Any, images: "Sequence[Future[ProcessedMedia]]") -> Any:
    try:
        return with_processed(prompt, [image.result() for image in images])
    except InvalidRequestError:
        return prompt


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _as_videos(value: Any) -> list[Any]:
    """A video, or a list of videos, as a list. A list of frames is one video, and so is (frames, metadata)."""
    if not isinstance(value, (list, tuple)):
        return _as_list(value)
    is_frames = bool(value) and all(_is_frame(each) for each in value)
    is_described = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
    return [value] if is_frames or is_described else list(value)


def _as_clips(value: Any) -> list[Any]:
    """A clip of audio, or a list of clips, as a list. (samples, rate) is one clip."""
    is_clip = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], numbers.Number)
    return [value] if is_clip else _as_list(value)


_LISTS = {"image": _as_list, "video": _as_videos, "audio": _as_clips}


def _is_frame(value: Any) -> bool:
    """Whether it is a Pillow image, or an array of one image."""
    return getattr(value, "ndim", 0) in (2, 3) or hasattr(value, "getbands")


def _as_media(kind: str, image: Any, uuid: Any, name: str) -> Media | ProcessedMedia:
    if uuid is not None and not isinstance(uuid, str):
        raise InvalidRequestError(f"{UUIDS} has {uuid!r}, must have strings", UUIDS)
    if isinstance(image, (Media, ProcessedMedia)):
        return image
    if image is None and uuid is None:
        raise InvalidRequestError(f"{name} is None; give {A[kind]}, or the uuid of one that was sent before", name)
    if isinstance(image, str):
        raise InvalidRequestError(
            f"{name} is a string; give its bytes, a Pillow image or an array, or send an address in a chat", name
        )
    return Media(kind, bytes(image) if isinstance(image, (bytearray, memoryview)) else image, uuid, name)
