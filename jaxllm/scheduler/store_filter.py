"""Which contents are offered to cache tiers, where not all of them are."""

from collections import OrderedDict
from collections.abc import Iterable

from jaxllm.config import CacheOptions
from jaxllm.kv_connectors import KVTransferConfig
from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock


class StoreFilter:
    """Lets contents pass that enough requests had, and if wanted only those that stood in a prompt."""

    def __init__(self, *, block_size: int, threshold: int = 0, max_tracked: int = 64_000, prompts_only: bool = False):
        """threshold: of requests that had a content; below 2 all pass. max_tracked: contents that are counted."""
        self._block_size, self._threshold, self._max_tracked, self._prompts_only = (
            block_size,
            threshold,
            max_tracked,
            prompts_only,
        )
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        """Requests by content, those of the latest request last."""
        self._in_prompts: dict[int, bytes] = {}
        """The contents of blocks, by block id, that stood in a prompt. Those of other contents that the blocks have now do not count."""

    @classmethod
    def of(cls, options: CacheOptions, block_size: int) -> "StoreFilter | None":
        """As the options have it; None: all contents are offered."""
        wanted = KVTransferConfig.of(options.kv_transfer_config).host_tier()
        if wanted.store_threshold < 2 and not wanted.offload_prompt_only:
            return None
        return cls(
            block_size=block_size,
            threshold=wanted.store_threshold,
            max_tracked=wanted.max_tracker_size,
            prompts_only=wanted.offload_prompt_only,
        )

    def note(self, request: Request, blocks: Iterable[tuple[int, KVCacheBlock]]) -> None:
        """A request has computed or found these contents, each with its index in the sequence."""
        for index, block in blocks:
            if block.block_hash is None or (self._prompts_only and (index + 1) * self._block_size > request.num_prompt_tokens):
                continue
            if self._prompts_only:
                self._in_prompts[block.block_id] = block.block_hash
            if self._threshold >= 2:
                self._counts[block.block_hash] = self._counts.pop(block.block_hash, 0) + 1
                if len(self._counts) > self._max_tracked:
                    self._counts.popitem(last=False)

    def passes(self, block: KVCacheBlock) -> bool:
        """Whether tiers are offered the content of a block."""
        name = block.block_hash
        if name is None or (self._prompts_only and self._in_prompts.get(block.block_id) != name):
            return False
        return self._threshold < 2 or self._counts.get(name, 0) >= self._threshold
