"""The loads of a host tier: parts are copied from slots to staging buffers, and written to blocks by a later plan."""

from collections.abc import Collection, Iterator, Sequence

from jaxllm.device_ops import AnyDeviceOp, FinishedCopy, ScatterBlocks, StageBlocks
from jaxllm.kv_tiers.contents import Contents
from jaxllm.kv_tiers.copies import Copies, Load, Part, Worth
from jaxllm.kv_tiers.copy_counts import CopyCounts
from jaxllm.kv_tiers.copy_pace import CopyPace
from jaxllm.kv_tiers.stores import Stores
from jaxllm.log import logger
from jaxllm.scheduler.cache_tier import TierStep

_OF_LOADS = (StageBlocks, ScatterBlocks)


class Loads:
    """Loads under way. Each has one use of its contents until they are staged."""

    def __init__(
        self,
        copies: Copies,
        worth: Worth,
        contents: Contents,
        stores: Stores,
        numbers: Iterator[int],
        free_staging: list[int],
    ):
        """stores: behind host memory. numbers: of copies and loads. free_staging: buffers, which loads take and give back."""
        self._copies, self._worth, self._contents, self._stores = copies, worth, contents, stores
        self._numbers, self._free_staging = numbers, free_staging
        self.under_way: dict[int, Load] = {}
        self.staging: dict[int, Part] = {}
        """Parts, also of cancelled loads, that are copied to a staging buffer, by the number of the copy."""
        self.writing: dict[int, Part] = {}
        """Parts whose blocks are written, by the number of the copy."""
        self._step_id = 0
        self._pace = CopyPace(copies.max_blocks)
        self._most_copied: int | None = None
        """Most blocks that the step which is being planned stages, and most that it writes, unless one part has more; None: any number."""
        self.num_loaded = self.num_damaged = 0
        self.counted = CopyCounts()

    def begin(self, block_ids: Sequence[int], names: Sequence[bytes]) -> int:
        """See `CacheTier.load`, as for the next one."""
        number, size = next(self._numbers), self._copies.max_blocks
        load = self.under_way[number] = Load(number, [False] * len(names), 0)
        found = {content.name: content for content in self._contents.found(names)}
        self._contents.use(found.values())  # before others need slots
        if absent := [name for name in names if name not in found]:
            self._stores.read(absent)
            read = self._contents.found(absent)
            self._contents.use(read)
            found |= {content.name: content for content in read}
        # What is here first. There may be no slot for all that is not.
        indices = sorted(
            (index for index, name in enumerate(names) if name in found), key=lambda i: found[names[i]].is_being_read
        )
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            load.waiting.append(Part(load, part, [block_ids[i] for i in part], [found[names[i]] for i in part]))
        for content in found.values():
            content.read_from = None
        load.num_left = len(load.waiting)
        return number

    def cancel(self, load_id: int) -> None:
        load = self.under_way.pop(load_id)
        load.is_cancelled = True
        for part in load.waiting:
            self._contents.release_all(part.contents)
        self._free_staging += [part.staging for part in load.staged]

    def cancel_all(self) -> None:
        """Cancel all loads."""
        for load_id in list(self.under_way):
            self.cancel(load_id)

    def clear(self) -> None:
        """Forget all, with the copies under way: they may never have begun."""
        for copies in (self.under_way, self.staging, self.writing):
            copies.clear()

    def mark_wrong(self, names: Collection[bytes]) -> None:
        """These contents were computed wrongly. The slots of those that are staged may have other contents by now."""
        for part in (*self.parts_that_read(), *self._parts_on_devices()):
            for content in part.contents:
                content.is_wrong |= content.name in names

    # Steps

    def begin_step(self, step_id: int, *, decodes: bool) -> None:
        """See CacheTier."""
        self._step_id = step_id
        self._most_copied = self._pace.most if decodes and self.under_way else None

    def go_on(self) -> TierStep:
        """Write what is staged, and report the loads that are over."""
        loaded = [(load.number, load.is_right) for load in self.under_way.values() if not load.num_left]
        for number, _ in loaded:
            del self.under_way[number]
        return TierStep(self._scatters(), loaded)

    def take_in(self, copy: FinishedCopy) -> None:
        """Process a copy that is over without error. Copies that are forgotten are ignored."""
        if (part := self.staging.pop(copy.number, None)) is not None:
            self._contents.release_all(part.contents)
            self._worth.note_copy(len(part.contents), copy.seconds)
            self.counted.note(len(part.contents) * self._copies.block_bytes, copy.seconds)
            if part.load.is_cancelled:
                self._free_staging.append(part.staging)
            else:
                part.load.staged.append(part)
        elif (part := self.writing.pop(copy.number, None)) is not None:
            self._free_staging.append(part.staging)
            self._end_part(part, copy.is_right)

    def _end_part(self, part: Part, is_right: Sequence[bool]) -> None:
        """The blocks of a part are written, those whose content is right."""
        damaged = [content for content, right in zip(part.contents, is_right, strict=True) if not right]
        if damaged:
            logger.warning("%d blocks in host memory are not what was stored, and are computed again", len(damaged))
            self.num_damaged += len(damaged)
            for content in damaged:
                content.is_wrong = True
                self._contents.remove(content)
            self._stores.discard([content.name for content in damaged])
        self.num_loaded += len(is_right) - len(damaged)
        for index, content in zip(part.indices, part.contents, strict=True):
            part.load.is_right[index] = not content.is_wrong
        part.load.num_left -= 1

    def note_decodes(self, ops: Sequence[AnyDeviceOp], seconds: float) -> None:
        """See CacheTier."""
        counts = (
            len(op.slots) if isinstance(op, StageBlocks) else len(op.block_ids) for op in ops if isinstance(op, _OF_LOADS)
        )
        self._pace.note(sum(counts), seconds)

    def _scatters(self) -> list[AnyDeviceOp]:
        """Write the parts that are staged, or as many as the step may."""
        ops: list[AnyDeviceOp] = []
        num_blocks = 0
        for load in self.under_way.values():
            while load.staged and self._may_copy(num_blocks, load.staged[0]):
                part, number = load.staged.pop(0), next(self._numbers)
                num_blocks += len(part.contents)
                self.writing[number], part.step_id = part, self._step_id
                ops.append(ScatterBlocks(number, part.staging, part.block_ids))
        return ops

    def _may_copy(self, num_blocks: int, part: Part) -> bool:
        """Whether a step that copies so many blocks may copy a part too."""
        return not num_blocks or self._most_copied is None or num_blocks + len(part.contents) <= self._most_copied

    def stages(self) -> list[AnyDeviceOp]:
        """Stage as many parts as there are buffers, those of the earliest loads first."""
        ops: list[AnyDeviceOp] = []
        num_blocks = 0
        for load in self.under_way.values():
            while self._free_staging and (part := load.next_part()) is not None:
                if not self._may_copy(num_blocks, part):
                    load.waiting.insert(0, part)
                    return ops
                self._contents.release_all(part.drop_missing())
                if not part.contents:
                    load.num_left -= 1
                    continue
                part.sort()
                num_blocks += len(part.contents)
                number, part.staging = next(self._numbers), self._free_staging.pop()
                self.staging[number] = part
                ops.append(StageBlocks(number, part.staging, [each.slot for each in part.contents]))
        return ops

    def parts_that_read(self) -> list[Part]:
        """The parts of loads whose slots copies read, or will."""
        return [*(part for load in self.under_way.values() for part in load.waiting), *self.staging.values()]

    def _parts_on_devices(self) -> list[Part]:
        """The parts of loads that are staged, whose slots nothing reads any more."""
        return [*(part for load in self.under_way.values() for part in load.staged), *self.writing.values()]

    def buffers(self) -> list[int]:
        """The staging buffers in use."""
        return [part.staging for part in (*self.staging.values(), *self._parts_on_devices())]
