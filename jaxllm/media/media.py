"""An image, a video or a clip of audio as it came with a prompt, and what becomes of it before the engine gets it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image


Check = Callable[[], None]
"""Called between the frames of a video; raises MediaUnwantedError once no request waits for it any more."""


class MediaUnwantedError(Exception):
    """The preparation of an item ended before it was done, because no request waits for it any more."""


def unchecked() -> None:
    """A Check of what is always wanted."""


@dataclass(frozen=True)
class Media:
    """One item of a prompt, before preprocessing."""

    kind: str
    """"image", "video" or "audio"."""
    data: Union[bytes, "PIL.Image.Image", "np.ndarray", Sequence[Any], None]
    """The bytes of a file, a Pillow image, or uint8 [height, width, 3 or 4 or none]; of a video the bytes of a file, uint8 [frames, height,
    width, 3 or 4], a list of images, or (frames, metadata); of audio samples [n] or
    [n, channels], or (samples, rate); None: the one that was prepared with this uuid."""
    uuid: str | None = None
    """The caller's name of the content: items with equal ones are the same, whatever their data."""
    name: str = "prompt"
    """Its name in errors, e.g. messages[0].content[1]: the `param` of InvalidRequestError."""
    check: Check = field(default=unchecked, compare=False)
    """Ends its preparation, if no request waits for it any more."""


@dataclass(frozen=True)
class ProcessedMedia:
    """An image, a video, or a clip of audio, ready to be encoded."""

    kind: str
    content_hash: bytes
    """32 bytes, over the content or the uuid, the grid, and all settings that shape the payload."""
    token_ids: tuple[int, ...]
    """The tokens of a prompt that stand for it; audio has none."""
    grid: tuple[int, int, int]
    """Its embeddings: how many tiles or time steps, and the rows and columns of each. An image that is not cut into tiles is one, and
    so is audio."""
    payload: bytes
    """Its patches or features: see jaxllm/media/payload.py and features.py."""
    embedding_runs: tuple[tuple[int, int], ...] = ()
    """(offset, count) of each run of its tokens that an embedding replaces; empty: all are replaced."""
    steps: tuple["ProcessedMedia", ...] = ()
    """The time steps of a video, each a separate item; the video itself has no payload."""
    label: str = ""
    """Text before a time step."""

    @property
    def items(self) -> "tuple[ProcessedMedia, ...]":
        """The items that are encoded and placed in prompts separately."""
        return self.steps or (self,)

    @property
    def num_bytes(self) -> int:
        return sum(len(item.payload) for item in self.items)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_embeddings(self) -> int:
        tiles, rows, columns = self.grid
        return tiles * rows * columns
