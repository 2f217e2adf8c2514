"""Allocates the blocks that each request's tokens need, shares blocks with equal content, and frees them.

Handles one group of full-attention layers: a request keeps every block until it ends (kernels implement sliding windows).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxllm.config import CacheOptions
from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.block_pool import BlockPool


@dataclass(frozen=True)
class CachedPrefix:
    """The prefix of a request that is already in the prefix cache."""

    blocks: Sequence[KVCacheBlock] = ()
    num_computed_tokens: int = 0
    """Tokens that need not be computed: at most all but the last, whose hidden state gives the next token."""
    num_cached_tokens: int = 0
    """Tokens in `blocks`."""


NO_PREFIX = CachedPrefix()


class _BlockTable:
    """The blocks of one request, append-only."""

    __slots__ = ("blocks", "num_shared", "num_published")

    def __init__(self, shared: Sequence[KVCacheBlock]):
        self.blocks = list(shared)
        self.num_shared = len(shared)
        """Number of leading blocks found in the prefix cache at admission."""
        self.num_published = len(shared)
        """Number of leading blocks that were found in the prefix cache or added to it."""


class KVCacheManager:
    """Block tables by request, on top of a `BlockPool`."""

    def __init__(self, options: CacheOptions, num_blocks: int):
        self.block_size = options.block_size
        self.enable_prefix_caching = options.enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, _BlockTable] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> list[int]:
        """The block table of a request, as a new list."""
        table = self._tables.get(request_id)
        return [block.block_id for block in table.blocks] if table else []

    def num_blocks_of(self, request_id: str) -> int:
        """Length of the block table of a request."""
        table = self._tables.get(request_id)
        return len(table.blocks) if table else 0

    def reads_cache(self, request: Request) -> bool:
        """Whether the request is looked up in the prefix cache."""
        return self.enable_prefix_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """Find the longest cached run of full blocks from the start of a request. Changes nothing.

        If it covers the whole request, the last token is recomputed while all blocks stay shared.
        """
        if not self.reads_cache(request):
            return NO_PREFIX
        blocks = []
        for block_hash in request.block_hashes:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        num_cached = len(blocks) * self.block_size
        return CachedPrefix(blocks, min(num_cached, request.num_tokens - 1), num_cached)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        prefix: CachedPrefix = NO_PREFIX,
        *,
        num_reserved_blocks: int = 0,
        whole_sequence_must_fit: bool = False,
    ) -> list[int] | None:
        """Allocate blocks for the next `num_new_tokens` of a request. Its first allocation also takes `prefix`.

        Returns the ids of the new blocks (without those of the prefix). Returns None and changes nothing if there are too few
        free blocks for these tokens, or for all known tokens if the whole sequence must fit. The reserved blocks always stay
        free.
        """
        num_tokens = request.num_computed_tokens + prefix.num_computed_tokens + num_new_tokens
        table = self._tables.get(request.request_id)
        if table is not None and num_tokens <= len(table.blocks) * self.block_size:
            # The fast path of nearly every decode: it runs for each request in each step.
            if len(request.block_hashes) > table.num_published:
                self._publish(request, table, num_tokens)
            return []
        num_held = len(table.blocks) if table is not None else len(prefix.blocks)
        num_new_blocks = max(0, -(-num_tokens // self.block_size) - num_held)
        num_needed = num_new_blocks
        if whole_sequence_must_fit:
            num_needed = max(num_needed, self.num_blocks_for(request.num_tokens) - num_held)
        # An unused cached block leaves the free queue, just like a new one.
        num_needed += sum(block.ref_count == 0 for block in prefix.blocks)
        if num_needed + num_reserved_blocks > self.pool.num_free_blocks:
            return None
        if table is None:
            self.pool.touch(prefix.blocks)
            table = self._tables[request.request_id] = _BlockTable(prefix.blocks)
        new_blocks = self.pool.allocate(num_new_blocks)
        table.blocks += new_blocks
        self._publish(request, table, num_tokens)
        return [block.block_id for block in new_blocks]

    def free(self, request: Request, num_valid_tokens: int) -> None:
        """Free all blocks of a request. Blocks filled by the first `num_valid_tokens` stay in the prefix cache.

        Steps in flight may still write these blocks. That is safe: the device runs steps in order, so the next owner of a block
        writes it later.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        self._publish(request, table, num_valid_tokens)
        for block in table.blocks[max(table.num_shared, num_valid_tokens // self.block_size) : table.num_published]:
            self.pool.forget(block)
        # The end of a sequence is the least likely to be reused: evict it first.
        self.pool.free(table.blocks[::-1])

    def _publish(self, request: Request, table: _BlockTable, num_tokens: int) -> None:
        """Add the blocks filled by the first `num_tokens` to the prefix cache, as far as their tokens are known."""
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        for index in range(table.num_published, num_full):
            self.pool.publish(table.blocks[index], request.block_hashes[index])
        table.num_published = max(table.num_published, num_full)

    def reset_prefix_cache(self) -> bool:
        """Discard all cached content. Does nothing and returns False while any request holds blocks."""
        return self.pool.reset()

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Raise AssertionError unless these requests have the tables, and blocks are shared only where content is equal."""
        self.pool.check_integrity()
        assert self._tables.keys() == {request.request_id for request in requests}, "tables of requests that do not run"
        uses = [0] * len(self.pool.blocks)
        content: dict[int, tuple[int, bytes]] = {}
        for request in requests:
            table = self._tables[request.request_id]
            assert table.num_shared <= table.num_published <= len(request.block_hashes), "published blocks of unknown content"
            assert len({block.block_id for block in table.blocks}) == len(table.blocks), "a block twice in one table"
            for index, block in enumerate(table.blocks):
                uses[block.block_id] += 1
                if index < table.num_published:
                    block_hash = request.block_hashes[index]
                    # None if the content proved invalid after other requests had found it.
                    assert block.block_hash in (None, block_hash), f"{block} is published under a wrong hash"
                    assert content.setdefault(block.block_id, (index, block_hash)) == (index, block_hash), (
                        f"{block} is shared wrongly"
                    )
                else:
                    assert block.block_hash is None and block.ref_count == 1, f"{block} is shared before it is full"
        assert uses == [block.ref_count for block in self.pool.blocks], "reference counts differ from the tables"
