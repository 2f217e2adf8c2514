"""Which adapter is in which slot of the device, and which one gives way to another. Does not import JAX."""

import itertools
from collections.abc import Sequence

from jaxllm.lora.adapter import Adapter, Order
from jaxllm.scheduler_output import NO_ADAPTER


class SlotTable:
    """The contents of the slots.

    A slot with running requests is not taken. Of the others, an empty one is taken first, then the least recently used one. An adapter
    that requests wait for gives way only to one that an earlier request waits for, so two adapters never take turns without serving a
    request. An adapter that waited long closes a slot, which is taken when its running requests have ended.
    """

    def __init__(self, num_slots: int):
        self.contents: list[Adapter | None] = [None] * num_slots
        self.closed: frozenset[int] = frozenset()
        """Slots whose adapters admit no further requests, so that an adapter that waited long gets one."""
        self.reserved: int | None = None
        """The slot of the adapter that is being copied to the device."""
        self.num_evictions = 0
        self._ticks = itertools.count(1)
        self._used = [0] * num_slots
        """When each slot was last used."""
        self._first_waiting: list[Order | None] = [None] * num_slots
        """The first request that waited for each slot's adapter before the latest step."""

    def touch(self, slot: int) -> None:
        """A request was admitted with the adapter of a slot."""
        self._used[slot] = next(self._ticks)

    def reserve(self, adapter: Adapter) -> tuple[int, Adapter | None] | None:
        """Take a slot for an adapter. Returns the slot and the adapter that lost it; None if no slot can be taken now."""
        free = [slot for slot in range(len(self.contents)) if self._is_unused(slot) and self._gives_way(slot, adapter)]
        if not free:
            return None
        slot = min(free, key=lambda slot: (self._need(slot), self._used[slot]))
        evicted = self.contents[slot]
        if evicted is not None:
            self.num_evictions += 1
            self.clear(evicted)
        self.reserved = slot
        return slot, evicted

    def put(self, slot: int, adapter: Adapter) -> None:
        """The adapter is in the slot that was reserved for it."""
        assert self.reserved == slot and self.contents[slot] is None
        self.reserved = None
        self.contents[slot] = adapter
        adapter.slot = slot
        self.touch(slot)

    def clear(self, adapter: Adapter) -> None:
        """The adapter has no slot any longer."""
        self.contents[adapter.slot] = None
        adapter.slot = NO_ADAPTER

    def close(self, adapters: Sequence[Adapter]) -> None:
        """Let no request be admitted to as many slots as these adapters, the first in turn first, wait for: those with the fewest
        running requests. Slots that were closed before and are not needed now are open again."""
        before, closed = self.closed, set[int]()
        for adapter in adapters:
            slots = [slot for slot in range(len(self.contents)) if slot not in closed and self._gives_way(slot, adapter)]
            if slots:
                closed.add(min(slots, key=lambda slot: (self._num_running(slot), slot not in before)))
        self.closed = frozenset(closed)

    def _gives_way(self, slot: int, adapter: Adapter) -> bool:
        """Whether a slot may go to this adapter once no request runs in it."""
        content = self.contents[slot]
        if slot == self.reserved:
            return False
        return content is None or not content.is_pinned and (not len(content.waiting) or adapter.order < content.order)

    def note_waiting(self) -> None:
        """Record who waits for the adapters in slots. Called once a step, so that requests which the step admits are not taken for such
        that wait for something else."""
        self._first_waiting = [
            None if content is None or not len(content.waiting) else content.order for content in self.contents
        ]

    def _is_unused(self, slot: int) -> bool:
        """Whether no request runs in a slot, or will with the next step."""
        content = self.contents[slot]
        if content is None or content.running:
            return content is None
        return not len(content.waiting) or slot in self.closed or content.order == self._first_waiting[slot]

    def _need(self, slot: int) -> int:
        """0: it is empty; 1: no request waits for its adapter; 2: some do."""
        content = self.contents[slot]
        return 0 if content is None else 1 if not len(content.waiting) else 2

    def _num_running(self, slot: int) -> int:
        content = self.contents[slot]
        return 0 if content is None else len(content.running)
