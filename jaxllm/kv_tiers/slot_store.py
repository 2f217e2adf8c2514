"""The interface of a store behind host memory, e.g. files, or the host memory of another engine."""

import mmap
import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import SchedulerStats


class SlotMemory(Protocol):
    """Host memory that a store may access: the slots that it was given, until their transfer is over."""

    block_bytes: int
    """Bytes of a block's content."""
    slot_bytes: int
    """Bytes from one slot to the next."""
    sums: np.ndarray
    """uint32 [slots, parts, sums]: checksums that the devices computed. They travel with the content."""

    def view(self, slot: int, count: int = 1) -> memoryview:
        """The bytes of a slot's content, which can be written; of so many consecutive slots with what lies between their contents."""


class Regions(Protocol):
    """Slots of other processes' memory that is mapped here, which copies to devices read where they are. Any thread calls all methods."""

    def add_region(self, memory: mmap.mmap, stop: threading.Event) -> int:
        """Prepare copies from another arena with slots of the same size; takes long, and holds up steps as little as it can. Returns the
        number of its region. Raises RuntimeError if devices cannot read it, and soon after `stop` was set."""

    def slot(self, region: int, index: int, sums: np.ndarray) -> int | None:
        """Lend a slot whose content has these checksums. Returns its number; None while one with others is lent: copies that were planned
        are to notice that the slot has another content now."""

    def give_back(self, slot: int) -> None:
        """A slot is lent once less."""

    def region_of(self, slot: int) -> int:
        """The region of a slot."""

    def remove_region(self, number: int) -> None:
        """No plan reads its slots any more. Waits for copies; the memory may be unmapped afterwards."""


class Transfer(NamedTuple):
    """A transfer that is over."""

    number: int
    is_right: Sequence[bool]
    """Whether each content has arrived, whole. The slot of another may have anything in it. Empty: the store refused this write, and has
    room for it now."""
    seconds: float
    slots: Sequence[int] = ()
    """Where contents are that the store lends. Copies to devices may read these slots until they are given back."""


class SlotStore(Protocol):
    """Keeps contents by name, and copies them from and to slots in its own threads. The step loop's thread calls all methods, and none
    waits. Whenever a transfer is over, the store calls the function `wake` that it was made with."""

    name: str
    """Label of its metrics, and of where the tokens of a request came from."""
    writes: bool
    """Whether it takes contents that leave host memory."""
    listener: TierListener | None
    """If set, a store with its own contents, e.g. files, calls it in the step loop's thread when contents are added or removed, with the
    medium STORAGE. At most one store of a tier does."""

    def find(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that it can probably read now."""

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that it cannot read yet and may later, because another engine computes them."""

    def lends(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that devices can read where they are: they need no slot of host memory."""

    def give_back(self, slot: int) -> None:
        """No copy reads a lent content any more. Called once for each."""

    def seconds(self, num_blocks: int) -> float:
        """Estimated time to read so many."""

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Begin to copy contents to slots, which nothing else uses until `finished` has the number. Without slots: begin to lend them."""

    def is_opening(self) -> bool:
        """Whether it is finding out which contents it has, or making room, and takes none meanwhile; begins to if need be. False after some
        seconds without success."""

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Begin to copy contents from slots, which nothing changes until `finished` has the number. False: not now, for lack of room or
        time. `finished` may have the number of a refused one too, without contents, once it is worth another try."""

    def finished(self) -> list[Transfer]:
        """The transfers that are over since the last call, and refused writes for which there is room now."""

    def discard(self, names: Sequence[bytes]) -> None:
        """Drop contents that are wrong."""

    def reset(self, *, external: bool) -> None:
        """The weights may be others from now on. external: drop what other engines share too."""

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add its numbers."""

    def close(self) -> None:
        """Give up what is under way, and end its threads. No slot is used afterwards."""
