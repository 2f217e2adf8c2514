"""Manages all blocks of the KV cache: allocation, lookup by content, and eviction. Independent of requests."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_events import EventCollector
from jaxllm.scheduler.cache_observer import CacheObserver
from jaxllm.scheduler.free_queue import FreeBlockQueue
from jaxllm.scheduler.prefix_states import is_of_states


class BlockPool:
    """Blocks 0 … num_blocks-1. Block 0 is the null block: padding points to it, and it is never allocated.

    A free block keeps its cached content until it is allocated again. The block that has been free longest goes first (LRU).
    """

    def __init__(self, num_blocks: int):
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._free = FreeBlockQueue(self.blocks[1:])
        # Blocks by content. Two requests that compute the same content at the same time keep a block each,
        # because tables are append-only; the rare second block turns the value into a dict by block id.
        self._cached: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self.is_cached: Callable[[bytes], bool] = self._cached.__contains__
        """Whether `find` finds a block. A prompt asks it thousands of times, so no function lies between."""
        self.events: EventCollector | None = None
        """If set, receives which contents came with their first block and left with their last."""
        self.observer: CacheObserver | None = None
        """If set, notified of contents that left with their last block, but not of states. Code that publishes blocks reports new contents
        to it."""
        self.num_state_blocks = 0
        """Blocks in which states by row can be found."""
        self.num_allocated = 0
        """Blocks that were allocated since the start."""
        self.evicting: Callable[[Sequence[KVCacheBlock]], None] | None = None
        """If set, is called with blocks whose contents leave with them, before they do."""

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that requests hold."""
        return 1.0 - self.num_free_blocks / max(1, self.num_usable_blocks)

    def next_free(self, count: int) -> list[KVCacheBlock]:
        """The free blocks that `allocate` takes."""
        return list(islice(self._free, count))

    def cold(self, count: int) -> list[KVCacheBlock]:
        """A block of each content among the first `count` free blocks, in order of eviction."""
        first = islice(self._free, count)
        return list({block.block_hash: block for block in first if block.block_hash is not None}.values())

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks in order of reuse. Takes linear time: for tests."""
        return [block.block_id for block in self._free]

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """Find a block with this content. Prefers a block in use, because using a free one takes it from the free queue."""
        found = self._cached.get(block_hash)
        return max(found.values(), key=lambda block: block.ref_count) if isinstance(found, dict) else found

    def find_all(self, hashes: Iterable[bytes]) -> dict[bytes, KVCacheBlock]:
        """Find a block for each of these contents that there is one of."""
        cached = self._cached
        return {name: block for name in hashes if name in cached and (block := self.find(name)) is not None}

    def missing(self, hashes: Iterable[bytes]) -> list[bytes]:
        """The contents among these that `find` does not find. One call for many, as a prompt has thousands."""
        cached = self._cached
        return [name for name in hashes if name not in cached]

    def cached_hashes(self) -> Iterable[bytes]:
        """The contents that `find` finds."""
        return self._cached.keys()

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Allocate the first `count` free blocks and discard their content. Raises IndexError if there are fewer."""
        blocks = self._free.popleft_n(count)
        self.num_allocated += count
        if self.evicting is not None:
            self._report_eviction(blocks, self.evicting)
        for block in blocks:
            self.forget(block)
            block.ref_count = 1
        return blocks

    def _report_eviction(self, blocks: Iterable[KVCacheBlock], evicting: Callable[[Sequence[KVCacheBlock]], None]) -> None:
        going = {block.block_hash: block for block in blocks if block.block_hash is not None}
        if not going:
            return
        ids = {block.block_id for block in blocks}
        leaving = []
        for name, block in going.items():
            present = self._cached[name]
            if not isinstance(present, dict) or present.keys() <= ids:
                leaving.append(block)
        if leaving:
            evicting(leaving)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to found blocks."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            block.num_hits += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one request's references. Blocks that become free are evicted in the order given.

        Blocks without cached content are reused first, the latest of them soonest: evicting them loses nothing.
        """
        empty: list[KVCacheBlock] = []
        findable: list[KVCacheBlock] = []
        for block in blocks:
            assert block.ref_count > 0, f"{block} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                (empty if block.block_hash is None else findable).append(block)
        self._free.prepend_n(empty)
        self._free.append_n(findable)

    def renew(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Have these blocks, as far as they are free, evicted after all others."""
        free = [block for block in blocks if block.ref_count == 0]
        for block in free:
            self._free.remove(block)
        self._free.append_n(free)

    def publish(self, block: KVCacheBlock, block_hash: bytes) -> bool:
        """Add a full block to the prefix cache. Returns whether no other block has its content."""
        assert block.block_hash is None and block is not self.null_block
        block.block_hash = block_hash
        self.num_state_blocks += is_of_states(block_hash)
        present = self._cached.get(block_hash)
        if present is None:
            self._cached[block_hash] = block
            if self.events is not None:
                self.events.changes[block_hash] = True
        elif isinstance(present, dict):
            present[block.block_id] = block
        else:
            self._cached[block_hash] = {present.block_id: present, block.block_id: block}
        return present is None

    def forget(self, block: KVCacheBlock) -> None:
        """Remove a block from the prefix cache. Other blocks with the same content stay."""
        if block.block_hash is None:
            return
        of_states = is_of_states(block.block_hash)
        self.num_state_blocks -= of_states
        present = self._cached[block.block_hash]
        if isinstance(present, dict):
            del present[block.block_id]
            if len(present) == 1:
                self._cached[block.block_hash] = next(iter(present.values()))
        else:
            del self._cached[block.block_hash]
            if self.events is not None:
                self.events.changes[block.block_hash] = False
            if self.observer is not None and not of_states:
                self.observer.removed(block.block_hash)
        block.block_hash = None
        block.num_hits = 0

    def reset(self) -> bool:
        """Discard all cached content. Does nothing and returns False while any block is used."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self._cached.clear()
        self.num_state_blocks = 0
        if self.events is not None:
            self.events.clear()
        if self.observer is not None:
            self.observer.cleared()
        for block in self.blocks:
            block.block_hash = None
            block.num_hits = 0
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if queue, counts and map disagree."""
        self._free.check_integrity()
        free = {block.block_id for block in self._free}
        assert len(free) == len(self._free), "a block is in the free queue twice"
        assert self.null_block.ref_count == 0 and self.null_block.block_hash is None, "the null block is in use"
        for block in self.blocks[1:]:
            assert (block.ref_count == 0) == (block.block_id in free), f"{block} is free and used, or neither"
        listed = [
            (block_hash, block)
            for block_hash, present in self._cached.items()
            for block in (present.values() if isinstance(present, dict) else [present])
        ]
        assert all(block.block_hash == block_hash for block_hash, block in listed), "a block is found by a hash not its own"
        assert self.num_state_blocks == sum(is_of_states(block_hash) for block_hash, _ in listed), (
            "blocks of states are miscounted"
        )
        assert len(listed) == sum(block.block_hash is not None for block in self.blocks), "a hashed block cannot be found"
