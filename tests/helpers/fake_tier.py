"""A cache tier that is a dictionary. Its loads take several steps, overtake each other, and may fail."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.device_ops import DeviceOp
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler.cache_tier import TierStep
from jaxllm.scheduler_stats import SchedulerStats


class CopyOut(DeviceOp, frozen=True):
    """Read a block into a list that the tier keeps."""

    block_id: int
    content: list[Any]

    def copy(self, memory: list[Any]) -> None:
        self.content.extend(memory[self.block_id])


class CopyIn(DeviceOp, frozen=True):
    """Write a content into a block."""

    block_id: int
    content: list[Any]

    def copy(self, memory: list[Any]) -> None:
        memory[self.block_id] = list(self.content)


@dataclass
class _Load:
    block_ids: Sequence[int]
    names: Sequence[bytes]
    num_steps: int
    """Until its ops are planned."""
    is_right: list[bool] = field(default_factory=list)
    """Once they are."""


class FakeTier:
    """max_steps: that a load takes. share_bad: of blocks whose load fails, which leaves something else in them. capacity: of contents;
    the oldest go first. share_stored: of contents that are offered ahead."""

    def __init__(
        self,
        rng: random.Random,
        *,
        max_steps: int = 3,
        share_bad: float = 0.0,
        capacity: int = 1000,
        num_cold: int = 0,
        load_blocks: int = 3,
        copy_blocks: int = 1000,
        share_stored: float = 0.7,
        patience_seconds: float = 1e9,
    ):
        self.num_cold, self.load_blocks, self.copy_blocks = num_cold, load_blocks, copy_blocks
        self.rng, self.max_steps, self.share_bad, self.capacity = rng, max_steps, share_bad, capacity
        self.share_stored = share_stored
        self.patience_seconds, self.min_tokens = patience_seconds, 1
        self.listener: TierListener | None = None
        self.changed: set[bytes] | None = None
        self.contents: dict[bytes, list[Any]] = {}
        self.coming: dict[bytes, list[Any]] = {}
        """Contents that another engine computes: a test moves them to the others."""
        self.stores: dict[bytes, tuple[int, list[Any]]] = {}
        """Contents by name that are right once a step is done."""
        self.loads: dict[int, _Load] = {}
        self.step_id = self.num_loads = self.num_loaded = self.num_waits = 0
        self.used = set[bytes]()
        """Contents that were found in the pool before they were offered."""
        self.num_late = 0
        """Contents that left the pool before they were stored ahead."""
        self.is_stuck = False
        """Whether no load makes progress."""
        self.can_store = True

    def match(self, names: Sequence[bytes]) -> set[bytes]:
        return self.contents.keys() & names

    def is_in_host(self, name: bytes) -> bool:
        return False

    def host_names(self) -> Sequence[bytes]:
        return ()

    def awaited(self, names: Sequence[bytes]) -> list[bytes]:
        return [name for name in names if name in self.coming]

    def sources(self, names: Sequence[bytes]) -> list[str]:
        """By the last bit of a name."""
        return [("host", "disk")[name[-1] % 2] for name in names]

    def load(self, block_ids: Sequence[int], names: Sequence[bytes]) -> int:
        assert len(block_ids) == len(names) == len(set(names)) > 0
        self.num_loads += 1
        self.loads[self.num_loads] = _Load(block_ids, names, self.rng.randint(0, self.max_steps))
        return self.num_loads

    def choose(self, names: Sequence[bytes], num_tokens: int) -> Sequence[bytes]:
        return names if num_tokens >= self.min_tokens else ()

    def wants(self, names: Sequence[bytes]) -> set[bytes]:
        return set(names) - self.contents.keys() - self.stores.keys()

    @property
    def is_storing(self) -> bool:
        return bool(self.stores)

    def end_step(self) -> list[DeviceOp]:
        return []

    def cancel(self, load_id: int) -> None:
        del self.loads[load_id]

    def store(self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes] = ()) -> list[DeviceOp]:
        self.used.update(used)
        self.num_late += len(self.wants(names))
        return self._store(block_ids, names)

    def _store(self, block_ids: Sequence[int], names: Sequence[bytes]) -> list[DeviceOp]:
        ops: list[DeviceOp] = []
        for block_id, name in zip(block_ids, names, strict=True):
            if name not in self.contents and name not in self.stores:
                content: list[Any] = []
                self.stores[name] = self.step_id, content
                ops.append(CopyOut(block_id, content))
        return ops

    def store_ahead(self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes] = ()) -> list[DeviceOp]:
        self.used.update(used)
        some = [pair for pair in zip(block_ids, names, strict=True) if self.rng.random() < self.share_stored]
        return self._store([block_id for block_id, _ in some], [name for _, name in some])

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """See CacheTier."""

    def add_stats(self, stats: SchedulerStats) -> None:
        """See CacheTier."""

    def check_integrity(self) -> None:
        """See CacheTier."""

    def discard(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.contents.pop(name, None)
            self.stores.pop(name, None)

    def begin_step(self, step_id: int, done_step_id: int) -> TierStep:
        self.step_id = step_id
        for name, (stored_at, content) in list(self.stores.items()):
            if stored_at <= done_step_id:
                assert content, "an op did not run"
                self.contents[name] = content
                del self.stores[name]
        while len(self.contents) > self.capacity:
            del self.contents[next(iter(self.contents))]
        loaded = [(load_id, load.is_right) for load_id, load in self.loads.items() if load.is_right]
        for load_id, is_right in loaded:
            del self.loads[load_id]
            self.num_loaded += sum(is_right)
        ops: list[DeviceOp] = []
        for load in () if self.is_stuck else self.loads.values():
            if load.num_steps == 0:
                for block_id, name in zip(load.block_ids, load.names, strict=True):
                    content = None if self.rng.random() < self.share_bad else self.contents.get(name)
                    ops.append(CopyIn(block_id, content or ["damaged"] * 4))
                    load.is_right.append(content is not None)
            load.num_steps -= 1
        return TierStep(ops, loaded)

    def wait(self, seconds: float) -> None:
        self.num_waits += 1

    def wait_for_stores(self, num_tokens: int) -> None:
        """Nothing holds stores up."""

    def close(self) -> None:
        """See CacheTier."""

    def forget(self, *, stored: bool, external: bool = False) -> None:
        self.stores.clear()
        self.loads.clear()
        if stored:
            self.contents.clear()
