"""A stand-in for a model's `MediaProcessor`: an image is an array [rows, columns], or a row of bytes; each value is a token."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media, MediaOptions, ProcessedMedia
from jaxllm.request import PromptItem
from jaxllm.text.prompt_media import PromptMedia

PLACEHOLDER_ID = 5


def picture(rows: int, columns: int, value: int = 0) -> np.ndarray:
    return np.full((rows, columns), value, np.uint8)


class StandInProcessor:
    """Counts what it prepares."""

    kinds = ("image",)

    def __init__(self, placeholder_id: int = PLACEHOLDER_ID, text: str = "<image>"):
        self.placeholder_id, self.text = placeholder_id, text
        self.prepared: list[tuple[Media, Mapping[str, Any] | None]] = []

    def process(self, media: Media, mm_processor_kwargs: Mapping[str, Any] | None = None) -> ProcessedMedia:
        self.prepared.append((media, mm_processor_kwargs))
        image: Any = np.frombuffer(media.data, np.uint8)[None] if isinstance(media.data, bytes) else media.data
        if not isinstance(image, np.ndarray):
            raise InvalidRequestError(f"{media.name} is no image", media.name)
        rows, columns = image.shape
        digest = hashlib.sha256(media.uuid.encode() if media.uuid is not None else image.tobytes()).digest()
        return ProcessedMedia("image", digest, (self.placeholder_id,) * (rows * columns), (1, rows, columns), image.tobytes())

    def placeholder(self, kind: str) -> str:
        return self.text

    def expand_text(self, text: str, processed: Sequence[ProcessedMedia]) -> str:
        return text

    def expand(self, token_ids: list[int], processed: Sequence[ProcessedMedia]) -> tuple[list[int], tuple[PromptItem, ...]]:
        count, total = token_ids.count(self.placeholder_id), sum(each.num_tokens for each in processed)
        if count not in (len(processed), total):
            raise InvalidRequestError(f"prompt has {count} placeholders for {len(processed)} images", "prompt")
        ids: list[int] = []
        items: list[PromptItem] = []
        rest = iter(token_ids)
        for token_id in rest:
            if token_id != self.placeholder_id:
                ids.append(token_id)
                continue
            image = processed[len(items)]
            for _ in range(image.num_tokens - 1 if count == total and count != len(processed) else 0):
                next(rest)
            items.append(
                PromptItem(image.kind, image.content_hash, len(ids), image.num_tokens, payload=image.payload, grid=image.grid)
            )
            ids += [self.placeholder_id] * image.num_tokens
        return ids, tuple(items)


def stand_in_media(processor: StandInProcessor | None, model: str = "tiny", **options: Any) -> PromptMedia:
    return PromptMedia(processor, MediaOptions(**options), model)  # type: ignore[arg-type]
