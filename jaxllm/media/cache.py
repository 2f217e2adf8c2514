"""Keeps prepared images up to a number of bytes: the ones used last."""

import threading
from collections import OrderedDict

from jaxllm.media.media import ProcessedMedia


class ProcessedCache:
    """Prepared images by key, least recently used first. Thread-safe."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._items: OrderedDict[bytes, ProcessedMedia] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_queries = 0
        """Images that were asked for."""
        self.num_hits = 0
        """Those that were there."""

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: bytes) -> ProcessedMedia | None:
        """The image kept under a key."""
        with self._lock:
            self.num_queries += 1
            if (found := self._items.get(key)) is not None:
                self.num_hits += 1
                self._items.move_to_end(key)
            return found

    def put(self, key: bytes, item: ProcessedMedia) -> None:
        """Keep an image, in place of those used longest ago. One larger than the cache is not kept."""
        size = item.num_bytes
        if size > self._max_bytes:
            return
        with self._lock:
            if (old := self._items.pop(key, None)) is not None:
                self.num_bytes -= old.num_bytes
            self._items[key] = item
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._items.popitem(last=False)
                self.num_bytes -= oldest.num_bytes

    def check_integrity(self) -> None:
        """Assert that the bytes are counted right and within the limit."""
        with self._lock:
            assert self.num_bytes == sum(item.num_bytes for item in self._items.values()) <= self._max_bytes
            assert 0 <= self.num_hits <= self.num_queries
