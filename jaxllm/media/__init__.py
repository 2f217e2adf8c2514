"""Images and audio of prompts, before the engine: from files to patches and placeholder tokens, or to features. Importing it imports no
Pillow.

`load_processor` makes the `MediaProcessor` or `AudioProcessor` of a model; `payload` has the form in which patches travel to the engine,
`features` that of audio.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions

if TYPE_CHECKING:
    from jaxllm.media.audio import AudioProcessor
    from jaxllm.media.processor import MediaProcessor
    from jaxllm.served_model import ServedModel

__all__ = ["Media", "MediaOptions", "ProcessedMedia", "load_processor"]


def load_processor(model_dir: Path, model: "ServedModel", options: MediaOptions) -> "MediaProcessor | AudioProcessor | None":
    """Load the preprocessor of a model's images or audio from the files in its directory; None: the model takes text alone.

    Raises ConfigError if a file asks for what is not supported, or an option contradicts the model.
    """
    if model.audio is not None and model.audio.tokens is None:
        from jaxllm.media.speech import make_speech_processor

        return make_speech_processor(model_dir, model.audio, model.vocab_size, options)
    if model.audio is not None:
        from jaxllm.media.audio_tokens import AudioTokenProcessor

        return AudioTokenProcessor(model.audio, options)
    if model.vision is None:
        return None
    from jaxllm.media.processor import make_processor  # imports Pillow

    return make_processor(model_dir, model.vision, options)
