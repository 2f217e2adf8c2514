"""Prepares the audio of a model's prompts: `AudioProcessor`."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.files import read_json
from jaxllm.media.audio_files import ToFloat, check_rate, read_audio, refuse, resampled
from jaxllm.media.cache import ProcessedCache
from jaxllm.media.features import log_mel, pack
from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.model_parts.audio import SAMPLE_RATE, Audio
from jaxllm.request import PromptItem

ENGLISH_VOCABULARY = 51864
"""Tokens of Whisper's models for English alone. Those for several languages have more."""


def make_audio_processor(directory: Path, audio: Audio, vocab_size: int, options: MediaOptions) -> "AudioProcessor":
    """By the files in a model directory. Raises ConfigError."""
    path = directory / "generation_config.json"
    given = read_json(path, error=ConfigError) if path.is_file() else {}
    told = given.get("is_multilingual") if isinstance(given, dict) else None
    return AudioProcessor(audio, options, is_multilingual=vocab_size > ENGLISH_VOCABULARY if told is None else bool(told))


class AudioProcessor:
    """Turns audio into features, for a model whose every prompt has one clip. Thread-safe; keeps what it prepared, up to a size."""

    kinds = ("audio",)

    def __init__(self, audio: Audio, options: MediaOptions, *, is_multilingual: bool = True):
        """is_multilingual: whether the model knows other languages than English."""
        self.audio, self.options, self.is_multilingual = audio, options, is_multilingual
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
        else:
            samples = self.samples(media)
            content = self._digest(b"samples", samples.tobytes())
        if (kept := self.cache.get(content)) is not None:
            return kept
        samples = self.samples(media) if samples is None else samples
        if len(samples) > self.audio.num_samples:
            refuse(
                media.name,
                f"has {len(samples) / SAMPLE_RATE:.1f} seconds, this model hears {self.max_seconds:g} at a time; cut it, or send it to "
                "/v1/audio/transcriptions, which does",
            )
        payload = pack(log_mel(samples, self.audio))
        processed = ProcessedMedia("audio", content, token_ids=(), grid=(1, 1, 1), payload=payload)
        self.cache.put(content, processed)
        return processed

    def samples(self, media: Media) -> np.ndarray:
        """Float32 [n] at 16 kHz. Raises InvalidRequestError."""
        data, name = media.data, media.name
        if isinstance(data, bytes):
            return read_audio(data, name, self.options)
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
        return resampled(data, int(rate), name, self.options, to_float)

    def placeholder(self, kind: str = "audio") -> str:
        """Empty: audio has no tokens in the prompt."""
        return ""

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        """The text."""
        return text

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        """The token ids, and the clip as an item at the first: all of them attend to it. Raises InvalidRequestError without a clip."""
        if len(processed) != 1:
            raise InvalidRequestError(
                f"the prompt has {len(processed)} clips of audio; this model needs 1: give multi_modal_data, or use "
                "/v1/audio/transcriptions",
                "prompt",
            )
        (media,) = processed
        if not token_ids:
            return token_ids, ()  # which is refused elsewhere
        return token_ids, (PromptItem(media.kind, media.content_hash, position=0, num_tokens=1, payload=media.payload),)

    def _digest(self, *parts: bytes) -> bytes:
        """32 bytes over content and the encoder's sizes: lengths are hashed too."""
        digest = hashlib.new(
            self.options.mm_hasher_algorithm, struct.pack("<2i", self.audio.num_bins, self.audio.num_positions)
        )
        for part in parts:
            digest.update(struct.pack("<q", len(part)))
            digest.update(part)
        return digest.digest()[:32]
