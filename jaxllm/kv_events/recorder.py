"""Records which contents each medium has, and changes since the last batch."""

import time
from array import array
from collections import OrderedDict
from typing import Protocol

from jaxllm.kv_events.messages import Batch, Block, Change, Medium
from jaxllm.request import Request
from jaxllm.scheduler.cache_observer import TierMedium

MAX_GONE = 8192
"""Contents that are remembered after they have left the devices, for tiers where they arrive later."""

_NOTHING: tuple[Block, tuple[Medium, ...]] = (Block(b""), ())


class Sink(Protocol):
    """Takes batches, without waiting."""

    def has_room(self) -> bool:
        """Whether the next batch is taken."""

    def put(self, batch: Batch) -> bool:
        """Take a batch. Returns False for one that is dropped."""

    def has_lost(self) -> bool:
        """Whether a batch that was taken was lost since the last call."""


class Recorder:
    """A `CacheObserver`. The step loop's thread calls all methods."""

    def __init__(self, sink: Sink, block_size: int, *, has_tiers: bool):
        self._sink, self._block_size, self._max_gone = sink, block_size, MAX_GONE if has_tiers else 0
        self._held: dict[bytes, tuple[Block, tuple[Medium, ...]]] = {}
        """Contents by name, and where each of them is."""
        self._gone: OrderedDict[bytes, Block] = OrderedDict()
        """Contents that no medium has any longer, the latest last."""
        self._changes: list[Change] = []
        self._is_behind = False
        """Whether the next batch must have everything, because subscribers missed changes or there were too many to send."""
        self.num_batches = self.num_dropped = 0
        """Batches that were handed on, and changes that were not."""

    def stored(self, name: bytes, request: Request, index: int) -> None:
        """See CacheObserver, as for the next two."""
        block, media = self._held.get(name, _NOTHING)
        if not block.token_ids:
            block = self._block(name, request, index)
        self._add(block, media, "GPU")

    def removed(self, name: bytes) -> None:
        self._remove(name, "GPU")

    def cleared(self) -> None:
        for name, (_, media) in list(self._held.items()):
            if "GPU" in media:
                self._remove(name, "GPU")
        self._changes.clear()
        self._is_behind = True

    def note_tier(self, medium: TierMedium, name: bytes, is_there: bool) -> None:
        """See TierListener. What is known already is ignored."""
        block, media = self._held.get(name) or (self._gone.get(name) or Block(name), ())
        if is_there and medium not in media:
            self._add(block, media, medium)
        elif not is_there and medium in media:
            self._remove(name, medium)

    def publish(self) -> None:
        """Hand on what has changed since the last call."""
        if self._sink.has_lost():
            self._is_behind = True
        if self._is_behind and self._sink.has_room():
            everything = [Change(block, medium, True) for block, media in self._held.values() for medium in media]
            self._is_behind = not self._put(Batch(time.time(), everything, is_whole=True))
        elif self._is_behind or (self._changes and not self._put(Batch(time.time(), self._changes))):
            self.num_dropped += len(self._changes)
            self._is_behind = True
        if self._changes:
            self._changes = []

    def _put(self, batch: Batch) -> bool:
        is_taken = self._sink.put(batch)
        self.num_batches += is_taken
        return is_taken

    def _add(self, block: Block, media: tuple[Medium, ...], medium: Medium) -> None:
        self._gone.pop(block.name, None)
        self._held[block.name] = block, (*media, medium)
        self._changes.append(Change(block, medium, True))

    def _remove(self, name: bytes, medium: Medium) -> None:
        block, media = self._held.pop(name)
        self._changes.append(Change(block, medium, False))
        if media := tuple(each for each in media if each != medium):
            self._held[name] = block, media
        elif self._max_gone and block.token_ids:
            self._gone[name] = block
            if len(self._gone) > self._max_gone:
                self._gone.popitem(last=False)

    def _block(self, name: bytes, request: Request, index: int) -> Block:
        start, hashes, options = index * self._block_size, request.block_hashes, request.options
        end = start + self._block_size
        adapter: tuple[int, str] | None = None
        keys: tuple[object, ...] = ()
        if options.adapter is not None and request.adapter is not None:
            adapter, keys = (request.adapter.number, options.adapter), (options.adapter,)
        if request.spec.items:
            overlapping = (item for item in request.spec.items if item.position < end and item.end > start)
            keys += tuple((item.content_hash.hex(), item.position - start) for item in overlapping)
        parent = hashes[index - 1] if index else None
        return Block(name, parent, array("I", request.token_ids[start:end]), adapter, keys or None, options.session_id)
