"""An image or a clip of audio as it came with a prompt, and what becomes of it before the engine gets it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image


@dataclass(frozen=True)
class Media:
    """One item of a prompt as it came."""

    kind: str
    """"image" or "audio"."""
    data: Union[bytes, "PIL.Image.Image", "np.ndarray", "tuple[np.ndarray, int]", None]
    """The bytes of a file; a Pillow image, or uint8 [height, width, 3 or 4 or none]; samples [n] or [n, channels], and their rate; None:
    the one that was prepared with this uuid."""
    uuid: str | None = None
    """The caller's name of the content: items with equal ones are the same, whatever their data."""
    name: str = "prompt"
    """What errors call it, e.g. messages[0].content[1]: the `param` of InvalidRequestError."""


@dataclass(frozen=True)
class ProcessedMedia:
    """An image, or a clip of audio, ready to be encoded."""

    kind: str
    content_hash: bytes
    """32 bytes, over the content or the uuid, the grid, and all settings that shape the payload."""
    num_tokens: int
    """Tokens of a prompt that stand for it."""
    grid: tuple[int, int, int]
    """Its embeddings in time, rows and columns; of audio 1."""
    payload: bytes
    """Its patches or features: see jaxllm/media/payload.py and features.py."""
    embedding_runs: tuple[tuple[int, int], ...] = ()
    """(offset, count) of each run of its tokens that an embedding replaces; empty: all are replaced."""

    @property
    def num_embeddings(self) -> int:
        time, rows, columns = self.grid
        return time * rows * columns
