"""The queue of free blocks, in order of reuse: the first is taken next, so it is also the order of eviction."""

from collections.abc import Iterable, Iterator

from jaxllm.scheduler.block import KVCacheBlock


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: one found in the prefix cache leaves the middle in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()):
        # Two sentinels spare every operation the case of an end.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free, self._tail.previous_free = self._tail, self._head
        self._length = 0
        self.append_n(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From the first block on."""
        block = self._head.next_free
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        """Take the first block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Take the first `count` blocks, in order. Raises IndexError if there are fewer."""
        if count > self._length:
            raise IndexError(f"{count} blocks asked of a free queue that holds {self._length}")
        taken = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.previous_free = block.next_free = None
            block = following
        self._join(self._head, block)
        self._length -= count
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle. Raises ValueError if it is not in the queue."""
        if block.previous_free is None or block.next_free is None:
            raise ValueError(f"{block} is not in the free queue")
        self._join(block.previous_free, block.next_free)
        block.previous_free = block.next_free = None
        self._length -= 1

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end, in the order given."""
        self._insert(self._tail.previous_free, blocks)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the start; the first given becomes the first."""
        self._insert(self._head, blocks)

    def _insert(self, after: KVCacheBlock | None, blocks: Iterable[KVCacheBlock]) -> None:
        assert after is not None
        following = after.next_free
        for block in blocks:
            self._join(after, block)
            after = block
            self._length += 1
        self._join(after, following)

    @staticmethod
    def _join(left: KVCacheBlock, right: KVCacheBlock | None) -> None:
        assert right is not None
        left.next_free, right.previous_free = right, left

    def check_integrity(self) -> None:
        """Raise AssertionError if links or length are inconsistent."""
        count, previous = 0, self._head
        for block in self:
            assert block.previous_free is previous, f"{block} does not point back to {previous}"
            previous = block
            count += 1
        assert self._tail.previous_free is previous, "the tail does not point back to the last block"
        assert count == self._length, f"the free queue holds {count} blocks and counts {self._length}"
