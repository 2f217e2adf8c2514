"""Prepares the audio of prompts, whatever models do with it: `AudioProcessor`."""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media.audio_files import ToFloat, check_rate, read_audio, refuse, resampled
from jaxllm.media.cache import ProcessedCache
from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.model_parts.audio import SAMPLE_RATE, Audio
from jaxllm.request import PromptItem


class AudioProcessor:
    """Turns clips of audio into features; what they are in prompts is a subclass's. Thread-safe; keeps what it prepared, up to a size."""

    kinds = ("audio",)
    transcribes = False
    """Whether the model writes down what is said, in prompts that have one clip each."""

    def __init__(self, audio: Audio, options: MediaOptions):
        """Raises ConfigError for options that audio does not have."""
        if options.mm_processor_kwargs:
            raise ConfigError("mm_processor_kwargs has no settings for audio; leave it out")
        self.audio, self.options = audio, options
        self.cache = ProcessedCache(int(options.mm_processor_cache_gb * 2**30))

    @property
    def max_seconds(self) -> float:
        """Seconds of the longest clip."""
        return self.audio.num_samples / SAMPLE_RATE

    def process(self, media: Media, mm_processor_kwargs: Mapping[str, Any] | None = None) -> ProcessedMedia:
        """Decode, resample, compute features and hash. Takes tens of milliseconds, most of them without the GIL.

        Raises InvalidRequestError, whose param is the item's name.
        """
        if media.kind not in self.kinds:
            raise InvalidRequestError(f"{media.name} is of kind {media.kind}; this model takes audio and text", media.name)
        if mm_processor_kwargs:
            raise InvalidRequestError("mm_processor_kwargs has no settings for audio; leave it out", "mm_processor_kwargs")
        samples = None
        if media.uuid is not None:
            content = self._digest(b"uuid", media.uuid.encode("utf-8", "surrogatepass"))
        elif isinstance(media.data, bytes):
            content = self._digest(b"file", media.data)
        else:
            samples = self.samples(media)
            content = self._digest(b"samples", samples.tobytes())
        if (kept := self.cache.get(content)) is not None:
            return kept
        samples = self.samples(media) if samples is None else samples
        processed = self.prepared(samples, content, media)
        self.cache.put(content, processed)
        return processed

    def prepared(self, samples: np.ndarray, content: bytes, media: Media) -> ProcessedMedia:
        """The clip of these samples, with this hash. Raises InvalidRequestError."""
        raise NotImplementedError

    def samples(self, media: Media) -> np.ndarray:
        """Float32 [n] at 16 kHz. Raises InvalidRequestError."""
        return self.read(media)

    def read(self, media: Media, heard: float = math.inf) -> np.ndarray:
        """As `samples`. heard: most seconds that the model takes."""
        data, name = media.data, media.name
        if isinstance(data, bytes):
            return read_audio(data, name, self.options, heard)
        if data is None:
            refuse(name, "has a uuid and no content, and no audio of that uuid is kept here; send its content")
        rate: Any = SAMPLE_RATE
        to_float: ToFloat = lambda samples: samples.astype(np.float32)  # noqa: E731
        if isinstance(data, tuple) and len(data) == 2:
            data, rate = data
        if not isinstance(data, np.ndarray) or data.dtype.kind not in "fiu" or not data.ndim:
            refuse(name, f"is a {type(data).__name__}, must be the bytes of a file, or an array of samples and their rate")
        check_rate(rate, name)
        if data.dtype.kind != "f":
            limits = np.iinfo(data.dtype)
            middle, half = (0, -float(limits.min)) if limits.min else ((limits.max + 1) / 2, (limits.max + 1) / 2)
            to_float = lambda samples: ((samples - middle) / half).astype(np.float32)  # noqa: E731
        return resampled(data, int(rate), name, self.options, to_float, heard)

    def placeholder(self, kind: str = "audio") -> str:
        """The text that stands for a clip in a prompt of plain text."""
        raise NotImplementedError

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        """The text."""
        return text

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        """The token ids with as many placeholders as each clip has tokens, and the items at them. Raises InvalidRequestError."""
        raise NotImplementedError

    def _digest(self, *parts: bytes) -> bytes:
        """32 bytes over content and the encoder's sizes: lengths are hashed too."""
        digest = hashlib.new(
            self.options.mm_hasher_algorithm, struct.pack("<2i", self.audio.num_bins, self.audio.num_positions)
        )
        for part in parts:
            digest.update(struct.pack("<q", len(part)))
            digest.update(part)
        return digest.digest()[:32]
