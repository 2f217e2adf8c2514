"""A tier in the host's memory: plans carry the operations that copy between blocks and slots, and threads of the executor do the copies."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from jaxllm.device_ops import AnyDeviceOp, FinishedCopy, GatherBlocks
from jaxllm.kv_tiers.contents import PROTECTED_SHARE, Content, Contents
from jaxllm.kv_tiers.copies import Copies, StoreCopy, Worth
from jaxllm.kv_tiers.copy_counts import CopyCounts, LostBlocks
from jaxllm.kv_tiers.loads import Loads
from jaxllm.kv_tiers.slot_store import SlotStore
from jaxllm.kv_tiers.stores import Stores
from jaxllm.observations import COPY_BLOCKS, Observations
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler.cache_tier import NOTHING, TierStep
from jaxllm.scheduler_stats import SchedulerStats

LOAD_COPIES = 16
"""So many copies keep a load busy: more than are over between two plans, as a rule."""
KEPT_BUFFERS = 2
"""Staging buffers that what is stored ahead leaves to contents that leave unforeseen."""
STEPS_AHEAD = 2
"""Contents are stored when so many of the largest steps may evict them."""
WAIT_SHARE = 0.25
"""Largest part of a step's time that the plan of the next one waits for stores. The device computes meanwhile."""
READ_AHEAD_SHARE = 1 / 2
"""Largest part of the slots for what a load will want of stores."""
PATIENCE_SECONDS = 10.0
"""A load that takes longer counts as failed."""
_SOURCE = "host"
"""See CacheTier.sources."""


class HostTier:
    """Contents of blocks in slots of host memory.

    A store is a gather, by the next plan, and a copy behind it: its staging buffer is free when the copy is over, and its contents can be
    loaded when the step of that plan is done too. A load is a copy for each part, which the next plan carries and later steps do not wait
    for; its end tells whether the blocks have what was stored. What is loaded stays in its slot, so it is not stored again.

    Behind it there may be stores: they are offered what makes room next, and what they have is read into slots before it is loaded, or
    loaded from slots that they lend.
    """

    patience_seconds = PATIENCE_SECONDS

    def __init__(
        self,
        copies: Copies,
        worth: Worth,
        *,
        num_cold: int,
        min_tokens: int = 1,
        protected_share: float = PROTECTED_SHARE,
        stores: Sequence[SlotStore] = (),
        writes_at_once: bool = False,
    ):
        """num_cold: see CacheTier. min_tokens: fewer are computed. protected_share: see Contents. stores: in the order in which they are
        asked. writes_at_once: whether these are offered each content once it is ready."""
        self._copies, self._worth, self.num_cold, self._min_tokens = copies, worth, num_cold, min_tokens
        self.copy_blocks = copies.max_blocks
        self.load_blocks = LOAD_COPIES * copies.max_blocks
        self.contents = Contents(copies.num_slots, protected_share, self._note_change)
        self._listener: TierListener | None = None
        self.changed: set[bytes] | None = None
        self._numbers = itertools.count(1)
        self._stores = Stores(stores, self.contents, self._numbers, copies.max_blocks, writes_at_once=writes_at_once)
        self._has_stores = bool(stores)
        self._free_staging = list(range(copies.num_staging))
        self._num_kept = min(KEPT_BUFFERS, copies.num_staging - 1)
        self._gathering: dict[int, StoreCopy] = {}
        """Stores whose copy is under way, by its number."""
        self._stored: deque[StoreCopy] = deque()
        """Stores whose copy is over and whose step may not be done."""
        self._loads = Loads(copies, worth, self.contents, self._stores, self._numbers)
        self._over: list[FinishedCopy] = []
        """Copies that are over and not processed. One that failed stays while its step is not done."""
        self._step_id = self._done_step_id = 0
        self._num_stored = 0
        self._stores_counted, self._lost = CopyCounts(), LostBlocks()
        self._allocated = Observations(COPY_BLOCKS)

    # See CacheTier

    def match(self, names: Sequence[bytes]) -> Collection[bytes]:
        here, behind = self.contents.loadable(names), self._stores.find(self.contents.missing(names))
        if not behind:
            return here
        found = {*here, *behind}
        return [name for name in names if name in found]

    def is_in_host(self, name: bytes) -> bool:
        return self.contents.is_kept(name)

    def host_names(self) -> Iterable[bytes]:
        return self.contents.ready_names()

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        return self._stores.awaited(self.contents.missing(names)) if self._has_stores else ()

    def choose(self, names: Sequence[bytes], num_tokens: int) -> Collection[bytes]:
        if num_tokens < self._min_tokens:
            return ()
        behind = self._stores.find(self.contents.missing(names))
        if not self._worth.is_worth_loading(len(names), num_tokens, self._stores.seconds(behind)):
            here = [name for name in names if self.contents.is_ready(name)]
            return here if len(here) < len(names) else ()
        self._protect(names)  # what is read must not take their place
        if behind:
            # They are loaded a part at a time, but read at once: host memory has room for them before the blocks are free.
            ahead = [name for name in names if name in behind][: int(READ_AHEAD_SHARE * self.contents.num_slots)]
            self._stores.read(ahead, ahead=True)
            self._protect(names)  # nor what is stored until they are loaded
        return names

    def _protect(self, names: Sequence[bytes]) -> None:
        self.contents.protect(self.contents.found(names))

    def sources(self, names: Sequence[bytes]) -> Sequence[str]:
        behind = self._stores.find(self.contents.missing(names))
        here = {name: content.read_from for name in names if (content := self.contents.get(name)) is not None}
        return [behind[name].name if name in behind else here.get(name) or _SOURCE for name in names]

    def load(self, block_ids: Sequence[int], names: Sequence[bytes]) -> int:
        return self._loads.begin(block_ids, names)

    def cancel(self, load_id: int) -> None:
        self._loads.cancel(load_id)

    def store(self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes] = ()) -> list[AnyDeviceOp]:
        ops, num_left = self._store(block_ids, names, used)
        if num_left:
            self._lost.note(num_left, for_slots=bool(self._free_staging))
        return ops

    def store_ahead(self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes] = ()) -> list[AnyDeviceOp]:
        return self._store(block_ids, names, used, num_kept=self._num_kept)[0]

    def _store(
        self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes], *, num_kept: int = 0
    ) -> tuple[list[AnyDeviceOp], int]:
        """The operations, and the number of contents for which there is no slot or staging buffer. num_kept: buffers that stay free."""
        missing = set(self.contents.missing(names))
        new = [(block, name) for block, name in zip(block_ids, names, strict=True) if name in missing] if missing else []
        ops: list[AnyDeviceOp] = []
        num_taken = 0
        while num_taken < len(new) and len(self._free_staging) > num_kept:
            taken: list[tuple[Content, int]] = []
            for block, name in new[num_taken : num_taken + self._copies.max_blocks]:
                if (content := self.contents.add(name, was_used=name in used)) is None:
                    break
                taken.append((content, block))
            if not taken:
                break
            taken.sort(key=lambda each: each[0].slot)
            contents, blocks = [content for content, _ in taken], [block for _, block in taken]
            num_taken += len(contents)
            self._allocated.add(len(contents))
            number, staging = next(self._numbers), self._free_staging.pop()
            self._gathering[number] = StoreCopy(contents, staging, self._step_id)
            ops.append(GatherBlocks(number, blocks, [content.slot for content in contents], staging))
        self._lost.note_stored(num_taken)
        return ops, len(new) - num_taken

    @property
    def can_store(self) -> bool:
        return len(self._free_staging) > self._num_kept

    def wants(self, names: Sequence[bytes]) -> Collection[bytes]:
        return self.contents.missing(names)

    def discard(self, names: Sequence[bytes]) -> None:
        for name in names:
            if (content := self.contents.get(name)) is not None:
                content.is_wrong = True
                self.contents.remove(content)
        self._loads.mark_wrong(set(names))
        self._stores.discard(names)

    def begin_step(self, step_id: int, done_step_id: int) -> TierStep:
        self._step_id, self._done_step_id = step_id, done_step_id
        if over := [*self._over, *self._copies.finished()]:
            self._over = []
            for copy in over:
                self._take_in(copy)
        while self._stored and self._stored[0].step_id <= done_step_id:
            self._make_ready(self._stored.popleft().contents)
        if self._has_stores:
            self._stores.take_in()
            self._stores.write_ahead()
        return TierStep((), self._loads.finished()) if self._loads.under_way else NOTHING

    @property
    def is_storing(self) -> bool:
        return self._stores.writes_at_once and (bool(self._gathering or self._stored) or self._stores.is_behind)

    def end_step(self) -> Sequence[AnyDeviceOp]:
        return self._loads.ops(self._step_id)

    def wait_for_stores(self, num_tokens: int) -> None:
        if not self._gathering:
            return
        num_free = len(self._free_staging) * self._copies.max_blocks
        if num_free >= self.num_cold / STEPS_AHEAD:
            return
        deadline = time.monotonic() + WAIT_SHARE * self._worth.step_seconds(num_tokens)
        while self._gathering.keys() - {copy.number for copy in self._over} and (left := deadline - time.monotonic()) > 0:
            self._copies.wait(left)
            self._over += self._copies.finished()

    def wait(self, seconds: float) -> None:
        self._copies.wait(seconds)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._worth.note_step(num_tokens, seconds)

    def forget(self, *, stored: bool, external: bool = False) -> None:
        if stored:
            # Copies under way end as they would, so their slots and buffers stay in use.
            self._loads.cancel_all()
            self.contents.clear()
            self._stores.reset(external=external)
            return
        self._stores.stop_at_once()
        # Operations may never have run. Before others do, the executor waits for copies and makes its buffers anew. Stores go on.
        for copies in (self._gathering, self._stored, self._over):
            copies.clear()
        self._loads.clear()
        self.contents.end_uses(but=self._lasting_uses())
        self._free_staging[:] = range(self._copies.num_staging)

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.num_host_slots += self.contents.num_slots
        stats.num_used_host_slots += len(self.contents)
        stats.num_stored_blocks += self._num_stored
        stats.num_loaded_blocks += self._loads.num_loaded
        stats.num_skipped_stores += self._lost.num_without_slot + self._lost.num_without_buffer
        stats.num_skipped_for_slots += self._lost.num_without_slot
        stats.num_damaged_blocks += self._loads.num_damaged
        stores, loads = self._stores_counted, self._loads.counted
        stats.stored_bytes, stats.loaded_bytes = int(stores.bytes.sum), int(loads.bytes.sum)
        stats.store_seconds, stats.load_seconds = stores.seconds.sum, loads.seconds.sum
        stats.store_byte_counts, stats.load_byte_counts = tuple(stores.bytes.counts), tuple(loads.bytes.counts)
        stats.store_second_counts, stats.load_second_counts = tuple(stores.seconds.counts), tuple(loads.seconds.counts)
        stats.host_block_counts, stats.num_allocated_host_slots = tuple(self._allocated.counts), int(self._allocated.sum)
        stats.host_block_bytes = self._copies.block_bytes
        stats.num_written_host_slots = sum(len(store.contents) for store in (*self._gathering.values(), *self._stored))
        stats.num_read_host_slots = sum(1 for _ in self._loads.contents_to_read())
        self._stores.add_stats(stats)

    def close(self) -> None:
        self._stores.close()

    @property
    def listener(self) -> TierListener | None:
        return self._listener

    @listener.setter
    def listener(self, listener: TierListener | None) -> None:
        self._listener = listener
        self._stores.set_listener(listener)

    def _note_change(self, name: bytes, is_there: bool) -> None:
        if self._listener is not None:
            self._listener("CPU", name, is_there)
        if self.changed is not None:
            self.changed.add(name)

    # Copies

    def _take_in(self, copy: FinishedCopy) -> None:
        """A copy is over. Raises its error; those of copies that are forgotten came with the failure of a step."""
        number = copy.number
        if copy.error is not None:
            planned = self._gathering.get(number) or self._loads.copying.get(number)
            if planned is not None and planned.step_id > self._done_step_id:
                # An earlier step may be why. It says so itself, and with that which requests it had.
                self._over.append(copy)
            elif planned is not None:
                raise copy.error
        elif (store := self._gathering.pop(number, None)) is not None:
            self._free_staging.append(store.staging)
            self._stored.append(store)
            self._num_stored += len(store.contents)
            # Both directions are as fast. Were loads alone noted, a few slow ones would end all for ever.
            self._worth.note_copy(len(store.contents), copy.seconds)
            self._stores_counted.note(len(store.contents) * self._copies.block_bytes, copy.seconds)
        else:
            self._loads.take_in(copy)

    def _make_ready(self, contents: Sequence[Content]) -> None:
        for content in contents:
            self.contents.make_ready(content)
            self._stores.note_ready(content)
        self.contents.release_all(contents)

    def _lasting_uses(self) -> Counter[Content]:
        """The uses of contents that go on when steps are forgotten."""
        return self._stores.uses()

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, buffers and copies disagree."""
        used = self._lasting_uses()
        used.update(content for store in (*self._gathering.values(), *self._stored) for content in store.contents)
        used.update(self._loads.contents_to_read())
        self.contents.check_integrity(used)
        buffers = [store.staging for store in self._gathering.values()]
        assert sorted([*self._free_staging, *buffers]) == list(range(self._copies.num_staging)), "a staging buffer is lost"
