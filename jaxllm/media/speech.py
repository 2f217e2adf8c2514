"""Prepares the audio of models whose every prompt has one clip, which their layers attend to: `SpeechProcessor`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.files import read_json
from jaxllm.media.audio import AudioProcessor
from jaxllm.media.audio_files import refuse
from jaxllm.media.features import log_mel, pack
from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.model_parts.audio import SAMPLE_RATE, Audio
from jaxllm.request import PromptItem

ENGLISH_VOCABULARY = 51864
"""Tokens of Whisper's models for English alone. Those for several languages have more."""


def make_speech_processor(directory: Path, audio: Audio, vocab_size: int, options: MediaOptions) -> "SpeechProcessor":
    """By the files in a model directory. Raises ConfigError."""
    path = directory / "generation_config.json"
    given = read_json(path, error=ConfigError) if path.is_file() else {}
    told = given.get("is_multilingual") if isinstance(given, dict) else None
    return SpeechProcessor(audio, options, is_multilingual=vocab_size > ENGLISH_VOCABULARY if told is None else bool(told))


class SpeechProcessor(AudioProcessor):
    """Turns clips into features, for a model that writes down what is said."""

    transcribes = True

    def __init__(self, audio: Audio, options: MediaOptions, *, is_multilingual: bool = True):
        """is_multilingual: whether the model knows other languages than English."""
        super().__init__(audio, options)
        self.is_multilingual = is_multilingual

    def prepared(self, samples: np.ndarray, content: bytes, media: Media) -> ProcessedMedia:
        if len(samples) > self.audio.num_samples:
            refuse(
                media.name,
                f"has {len(samples) / SAMPLE_RATE:.1f} seconds, this model hears {self.max_seconds:g} at a time; cut it, or send it to "
                "/v1/audio/transcriptions, which does",
            )
        return ProcessedMedia("audio", content, token_ids=(), grid=(1, 1, 1), payload=pack(log_mel(samples, self.audio)))

    def placeholder(self, kind: str = "audio") -> str:
        """Empty: audio has no tokens in the prompt."""
        return ""

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
