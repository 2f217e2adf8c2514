"""A histogram that observations are added to. Plain numbers in one thread, so that adding one costs almost nothing."""

import bisect
from collections.abc import Sequence

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds for the tokens that a step computes."""
COPY_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
"""Bounds for the bytes of a copy between devices and host memory: vLLM's."""
COPY_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Bounds for the time of one."""
COPY_BLOCKS = (1, 2, 5, 10, 20, 50, 100, 200)
"""Bounds for the blocks that get slots of host memory together."""


class Observations:
    """Number of values between the bounds, and their sum."""

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), sum: float = 0.0):
        self.bounds = bounds
        self.counts = list(counts) or [0] * (len(bounds) + 1)
        """Values up to the first bound, then up to each following one, then above all."""
        self.sum = sum

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, or several equal ones."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count
