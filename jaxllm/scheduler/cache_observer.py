"""Interfaces for observers of the contents of a pool's blocks and of tiers."""

from collections.abc import Callable
from typing import Literal, Protocol

from jaxllm.request import Request

TierMedium = Literal["CPU", "STORAGE"]
TierListener = Callable[[TierMedium, bytes, bool], None]
"""(medium, name, whether a content of this name can be loaded from there). Called when that changes."""


class CacheObserver(Protocol):
    """The step loop's thread calls all methods. Contents are named by `block_hash`, with the suffix of their group."""

    def stored(self, name: bytes, request: Request, index: int) -> None:
        """A block has a content that none had before: that of block `index` of the request."""

    def removed(self, name: bytes) -> None:
        """No block has a content any longer."""

    def cleared(self) -> None:
        """No block has any content. Those of tiers stay until they are reported too."""
