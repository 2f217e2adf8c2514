"""The interface of copies for the host tier, and its records of copies under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxllm.device_ops import FinishedCopy
from jaxllm.kv_tiers.contents import Content


class Copies(Protocol):
    """Runs the operations, on the devices' side."""

    @property
    def num_slots(self) -> int: ...
    @property
    def num_staging(self) -> int:
        """Staging buffers for stores."""

    @property
    def max_blocks(self) -> int:
        """Most blocks of an operation."""

    @property
    def block_bytes(self) -> int: ...
    def finished(self) -> list[FinishedCopy]:
        """The copies that are over since the last call."""

    def wait(self, seconds: float) -> None:
        """Return when a copy is over that `finished` did not return, after `wake`, or after this time."""

    def wake(self) -> None:
        """Have `wait` return, or the next one at once. Any thread may call it."""

    def cancel(self, number: int) -> None:
        """Give a `LoadBlocks` up that a plan has carried: when this returns, nothing writes its blocks or reads its slots any more. Waits
        for what is being copied just now. Whether the copy finishes is open."""


class Worth(Protocol):
    """See `Rates`."""

    def note_step(self, num_tokens: int, seconds: float) -> None: ...
    def note_copy(self, num_blocks: int, seconds: float) -> None: ...
    def step_seconds(self, num_tokens: int) -> float: ...
    def is_worth_loading(self, num_blocks: int, num_tokens: int, seconds: float = 0.0) -> bool: ...


@dataclass(eq=False)
class StoreCopy:
    """Contents that are being copied to their slots."""

    contents: list[Content]
    staging: int
    step_id: int
    """Once this step is done without error, what was read is right."""


@dataclass(eq=False)
class Part:
    """As much of a load as one copy brings."""

    load: "Load"
    indices: list[int]
    """Indices of its blocks in the load."""
    block_ids: list[int]
    contents: list[Content]
    step_id: int = 0
    """That of the plan that carries the copy."""

    def drop_missing(self) -> list[Content]:
        """Leave out the contents that were not read, and return them."""
        missing = [content for content in self.contents if not content.is_ready]
        if missing:
            self._take([number for number, content in enumerate(self.contents) if content.is_ready])
        return missing

    def sort(self) -> None:
        """Arrange it by slots. Neighbours are copied at once: in order of the sequence they run backwards, as its end is stored first."""
        self._take(sorted(range(len(self.contents)), key=lambda i: self.contents[i].slot))

    def _take(self, kept: Sequence[int]) -> None:
        self.indices, self.block_ids = [self.indices[i] for i in kept], [self.block_ids[i] for i in kept]
        self.contents = [self.contents[i] for i in kept]


@dataclass(eq=False)
class Load:
    """A load that is under way."""

    number: int
    is_right: list[bool]
    num_left: int
    """Parts that are not over."""
    waiting: list[Part] = field(default_factory=list)
    """Parts that no plan has carried."""

    def take_parts(self) -> list[Part]:
        """Take the parts, of those that no plan has carried, that have all their contents."""
        ready = [part for part in self.waiting if not any(content.is_being_read for content in part.contents)]
        self.waiting = [part for part in self.waiting if part not in ready]
        return ready
