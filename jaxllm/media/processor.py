"""Prepares the images of a model's prompts: `MediaProcessor`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.media.media import Media, ProcessedMedia
from jaxllm.media.options import MediaOptions
from jaxllm.model_parts.vision import Vision
from jaxllm.request import PromptItem


class MediaProcessor:
    """Turns pictures into patches, and their placeholders into tokens. Thread-safe; keeps what it prepared, up to a size."""

    def __init__(self, vision: Vision, options: MediaOptions, files: Mapping[str, Any]):
        self.vision, self.options = vision, options

    def process(self, media: Media, mm_processor_kwargs: Mapping[str, Any] | None = None) -> ProcessedMedia:
        """Decode, orient, resize, cut into patches and hash a picture. Takes milliseconds of a core, most of them without the GIL.

        mm_processor_kwargs: of the request, over those of the options. Raises InvalidRequestError, whose param is the item's name.
        """
        return ProcessedMedia("image", b"", 0, (0, 0, 0), b"")

    def placeholder(self, number: int) -> str:
        """The text that stands for picture `number`, from 1, in a prompt of plain text."""
        return ""

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        """The text with what the family writes around each picture, before it is tokenized."""
        return text

    def expand(
        self, token_ids: list[int], processed: Sequence[ProcessedMedia]
    ) -> tuple[list[int], tuple[PromptItem, ...]]:
        """The token ids with as many placeholders as each picture has tokens, and the items at them."""
        return token_ids, ()

    def count_tokens(self, width: int, height: int) -> int:
        """Tokens of a picture of this size in pixels."""
        return 0


def make_processor(model_dir: Path, vision: Vision, options: MediaOptions) -> MediaProcessor:
    return MediaProcessor(vision, options, {})
