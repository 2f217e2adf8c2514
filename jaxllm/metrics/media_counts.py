"""Counts what preparing the images, videos and audio of prompts takes: `MediaCounts`."""

import threading
from collections import Counter

from jaxllm.observations import Observations

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Bounds for the time that preparing an item takes."""


class MediaCounts:
    """Totals of one process since its start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = Observations(SECONDS)
        """Time that each prepared item took, without waiting for a thread."""
        self.num_items: Counter[str] = Counter()
        """Prepared items by kind, those found in the cache included."""
        self.fetched_bytes = 0
        """Bytes of items that came from other hosts, or from files that requests name."""

    def add_item(self, kind: str, seconds: float) -> None:
        """Count an item that was prepared."""
        with self._lock:
            self.num_items[kind] += 1
            self.seconds.add(seconds)

    def add_fetched(self, num_bytes: int) -> None:
        """Count bytes that were fetched."""
        with self._lock:
            self.fetched_bytes += num_bytes
