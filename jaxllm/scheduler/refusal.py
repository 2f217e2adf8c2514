"""Remembers which waiting request did not fit, so that its whole prompt is not looked up again in every step."""

from jaxllm.request import Request
from jaxllm.scheduler.kv_cache_manager import CachedPrefix, KVCacheManager


class Refusal:
    """The waiting request that did not fit, with the state that has to change before it can fit."""

    def __init__(self, request: Request, prefix: CachedPrefix, num_spare_blocks: int, manager: KVCacheManager):
        self.request = request
        num_unused = sum(block.ref_count == 0 for block in prefix.blocks)
        num_needed = manager.num_blocks_for(request.num_tokens) - len(prefix.blocks) + num_unused
        self._num_needed = max(num_needed, num_spare_blocks + 1)
        """Fewest spare blocks with which it may fit, as long as running requests hold no more of its blocks."""
        self._manager = manager
        self._next_block_hash = manager.first_unheld_hash(request, prefix)
        """Hash of its first block that no running request held. The blocks before it are shared and cost nothing; an unused
        cached block leaves the free queue, so it costs as much as a new one."""

    def holds(self, request: Request, num_spare_blocks: int) -> bool:
        """Whether this request still cannot fit: too few blocks are free, and it needs as many as before."""
        if self.request is not request or num_spare_blocks >= self._num_needed:
            return False
        next_block = None if self._next_block_hash is None else self._manager.pool.find(self._next_block_hash)
        return next_block is None or next_block.ref_count == 0
