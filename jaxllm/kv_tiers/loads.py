"""The loads of a host tier: parts are copied from slots to blocks while steps run."""

from collections.abc import Collection, Iterator, Sequence

from jaxllm.device_ops import AnyDeviceOp, FinishedCopy, LoadBlocks
from jaxllm.kv_tiers.contents import Content, Contents
from jaxllm.kv_tiers.copies import Copies, Load, Part, Worth
from jaxllm.kv_tiers.copy_counts import CopyCounts
from jaxllm.kv_tiers.stores import Stores
from jaxllm.log import logger


class Loads:
    """Loads under way. Each has one use of its contents until its blocks are written."""

    def __init__(self, copies: Copies, worth: Worth, contents: Contents, stores: Stores, numbers: Iterator[int]):
        """stores: behind host memory. numbers: of copies and loads."""
        self._copies, self._worth, self._contents, self._stores = copies, worth, contents, stores
        self._numbers = numbers
        self.under_way: dict[int, Load] = {}
        self.copying: dict[int, Part] = {}
        """Parts that plans have carried, by the number of the copy."""
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
        for part in load.waiting:
            self._contents.release_all(part.contents)
        for number, part in list(self.copying.items()):
            if part.load is load:
                self._copies.cancel(number)
                self._contents.release_all(self.copying.pop(number).contents)

    def cancel_all(self) -> None:
        """Cancel all loads."""
        for load_id in list(self.under_way):
            self.cancel(load_id)

    def clear(self) -> None:
        """Forget all, with the copies under way: they may never have begun."""
        self.under_way.clear()
        self.copying.clear()

    def mark_wrong(self, names: Collection[bytes]) -> None:
        """These contents were computed wrongly."""
        for content in self.contents_to_read():
            content.is_wrong |= content.name in names

    # Steps

    def finished(self) -> list[tuple[int, Sequence[bool]]]:
        """Take the loads that are over, with whether each block has its content."""
        over: list[tuple[int, Sequence[bool]]] = [
            (load.number, load.is_right) for load in self.under_way.values() if not load.num_left
        ]
        for number, _ in over:
            del self.under_way[number]
        return over

    def take_in(self, copy: FinishedCopy) -> None:
        """Process a copy that is over without error. Copies that are forgotten are ignored."""
        if (part := self.copying.pop(copy.number, None)) is not None:
            self._contents.release_all(part.contents)
            self._worth.note_copy(len(part.contents), copy.seconds)
            self.counted.note(len(part.contents) * self._copies.block_bytes, copy.seconds)
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

    def ops(self, step_id: int) -> list[AnyDeviceOp]:
        """The copies that the plan of this step carries: all whose contents are in host memory, those of the earliest loads first."""
        ops: list[AnyDeviceOp] = []
        for load in self.under_way.values():
            for part in load.take_parts() if load.waiting else ():
                self._contents.release_all(part.drop_missing())
                if not part.contents:
                    load.num_left -= 1
                    continue
                part.sort()
                number, part.step_id = next(self._numbers), step_id
                self.copying[number] = part
                ops.append(LoadBlocks(number, part.block_ids, [each.slot for each in part.contents]))
        return ops

    def contents_to_read(self) -> Iterator[Content]:
        """The contents of loads whose slots copies read, or will."""
        for load in self.under_way.values():
            for part in load.waiting:
                yield from part.contents
        for part in self.copying.values():
            yield from part.contents
