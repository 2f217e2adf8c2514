"""A histogram that observations are added to. Plain numbers in one thread, so that adding one costs almost nothing."""

import bisect
from collections.abc import Sequence

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds for the tokens that a step computes."""


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
