"""Prepares the audio of models that take clips in place of tokens of their prompts: `AudioTokenProcessor`."""

from collections.abc import Sequence

import numpy as np

from jaxllm.media.audio import AudioProcessor
from jaxllm.media.audio_files import refuse
from jaxllm.media.expansion import expand
from jaxllm.media.features import log_mel, num_frames, pack_part
from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.model_parts.audio import HOP, SAMPLE_RATE, Audio
from jaxllm.request import PromptItem


class AudioTokenProcessor(AudioProcessor):
    """Turns clips into features, and their placeholders into as many tokens as each has embeddings."""

    def __init__(self, audio: Audio, options: MediaOptions):
        super().__init__(audio, options)
        assert audio.tokens is not None
        self.tokens = audio.tokens
        self.min_samples = (2 * self.tokens.num_averaged - 2) * HOP + 1
        """Fewer have no embedding."""

    def samples(self, media: Media) -> np.ndarray:
        """Float32 [n] at 16 kHz of a clip. Raises InvalidRequestError, before all is decoded, for one longer than the model hears."""
        return self.read(media, self.max_seconds)

    def prepared(self, samples: np.ndarray, content: bytes, media: Media) -> ProcessedMedia:
        if len(samples) < self.min_samples:
            refuse(
                media.name,
                f"has {len(samples) / SAMPLE_RATE:.4f} seconds, too few for this model, which hears {self.min_samples / SAMPLE_RATE:.4f} "
                "at least; send a longer clip",
            )
        count = min(num_frames(len(samples)), self.audio.num_frames)
        num_tokens = self.tokens.num_embeddings(self.audio.positions_of(count))
        token_ids = (self.tokens.token_id,) * num_tokens
        payload = pack_part(log_mel(samples, self.audio), count)
        return ProcessedMedia("audio", content, token_ids, grid=(1, 1, num_tokens), payload=payload)

    def placeholder(self, kind: str = "audio") -> str:
        """See AudioProcessor."""
        return self.tokens.placeholder

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        """See AudioProcessor. The prompt has one placeholder for each clip, or all of them already."""
        return expand({"audio": self.tokens.token_id}, token_ids, processed)
