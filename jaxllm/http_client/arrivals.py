"""Computes the start times of a load test's requests."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class RampUp:
    """A request rate that grows over the run, by equal steps (linear) or equal factors (exponential)."""

    shape: Literal["linear", "exponential"]
    start_per_second: float
    end_per_second: float

    def rates(self, count: int) -> Iterator[float]:
        """The rate at each of `count` requests."""
        for index in range(count):
            progress = index / max(count - 1, 1)
            if self.shape == "linear":
                yield self.start_per_second + (self.end_per_second - self.start_per_second) * progress
            else:
                yield self.start_per_second * (self.end_per_second / self.start_per_second) ** progress


def start_times(
    count: int, per_second: float, *, burstiness: float = 1.0, ramp_up: RampUp | None = None, seed: int = 0
) -> list[float]:
    """Start times of the requests in seconds from the beginning; all 0 for an infinite rate.

    The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less is burstier, more is more even.
    Without a ramp they are scaled so that the last request starts at exactly count / per_second, to make runs comparable.
    """
    rng = np.random.default_rng(seed)
    rates = list(ramp_up.rates(count)) if ramp_up is not None else [per_second] * count
    gaps = [0.0 if np.isinf(rate) else rng.gamma(burstiness, 1 / (rate * burstiness)) for rate in rates]
    times = np.cumsum(gaps)
    if ramp_up is None and count and times[-1] > 0:
        times *= (count / per_second) / times[-1]
    return [float(time) for time in times]
