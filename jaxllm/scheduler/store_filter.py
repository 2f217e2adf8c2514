"""Which contents are offered to cache tiers, where not all of them are."""

from collections import OrderedDict
from collections.abc import Iterable

from jaxllm.config import CacheOptions
from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig


class StoreFilter:
    """Lets contents pass that enough requests had, and if wanted only those that stood in a prompt. Requests that limit what is stored of
    them (`max_offload_tokens`) do not count for what lies behind."""

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
        self._left_out: dict[int, bytes] = {}
        """The contents of blocks, by block id, that only requests had which do not have them stored."""

    @classmethod
    def of(cls, options: CacheOptions, block_size: int) -> "StoreFilter":
        """As the options have it."""
        wanted = KVTransferConfig.of(options.kv_transfer_config).host_tier()
        return cls(
            block_size=block_size,
            threshold=wanted.store_threshold,
            max_tracked=wanted.max_tracker_size,
            prompts_only=wanted.offload_prompt_only,
        )

    def note_computed(self, request: Request, index: int, block: KVCacheBlock) -> None:
        """A request has computed the content of a block, with this index in its sequence."""
        if block.block_hash is not None and self._leaves_out(request, index):
            self._left_out[block.block_id] = block.block_hash
        elif not self._passes_all:
            self._note(request, index, block)

    def note_found(self, request: Request, blocks: Iterable[tuple[int, KVCacheBlock]]) -> None:
        """A request has found these contents, each with its index in the sequence."""
        if self._passes_all:
            return
        for index, block in blocks:
            if not self._leaves_out(request, index):
                self._note(request, index, block)

    @property
    def _passes_all(self) -> bool:
        return self._threshold < 2 and not self._prompts_only and not self._left_out

    def _leaves_out(self, request: Request, index: int) -> bool:
        most = request.options.max_offload_tokens
        return most is not None and (index + 1) * self._block_size > most

    def _note(self, request: Request, index: int, block: KVCacheBlock) -> None:
        """A request had a content, and would have it stored."""
        self._left_out.pop(block.block_id, None)
        if block.block_hash is None or (self._prompts_only and (index + 1) * self._block_size > request.num_prompt_tokens):
            return
        if self._prompts_only:
            self._in_prompts[block.block_id] = block.block_hash
        if self._threshold >= 2:
            self._counts[block.block_hash] = self._counts.pop(block.block_hash, 0) + 1
            if len(self._counts) > self._max_tracked:
                self._counts.popitem(last=False)

    def passing(self, blocks: Iterable[KVCacheBlock]) -> dict[bytes, KVCacheBlock]:
        """The contents of blocks that tiers are offered, with their block."""
        passes = None if self._passes_all else self._passes
        return {block.block_hash: block for block in blocks if block.block_hash and (passes is None or passes(block))}

    def _passes(self, block: KVCacheBlock) -> bool:
        name = block.block_hash
        if name is None or self._left_out.get(block.block_id) == name:
            return False
        if self._prompts_only and self._in_prompts.get(block.block_id) != name:
            return False
        return self._threshold < 2 or self._counts.get(name, 0) >= self._threshold
