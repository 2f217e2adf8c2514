"""Cuts long audio into clips of what a model hears at a time. NumPy only."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxllm.model_parts.audio import SAMPLE_RATE

SEARCH_SAMPLES = SAMPLE_RATE
"""A cut is within so many samples before the longest clip would end, so that it need not be in a word."""
QUIET_SAMPLES = 1600
"""It is at the quietest run of so many."""


@dataclass(frozen=True)
class Clip:
    """A part of longer audio."""

    start: float
    """In seconds."""
    samples: np.ndarray

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


def cut(samples: np.ndarray, max_samples: int) -> list[Clip]:
    """The clips of mono samples at 16 kHz, one behind the other, each of at most `max_samples`."""
    places = [0, *_cuts(samples, max_samples), len(samples)]
    return [Clip(start / SAMPLE_RATE, samples[start:end]) for start, end in zip(places, places[1:], strict=False)]


def _cuts(samples: np.ndarray, max_samples: int) -> Iterator[int]:
    start = 0
    while len(samples) - start > max_samples:
        end = start + max_samples
        searched = samples[max(start + max_samples // 2, end - SEARCH_SAMPLES) : end]
        start = end - len(searched) + _quietest(searched)
        yield start


def _quietest(samples: np.ndarray) -> int:
    """The middle of the quietest run."""
    length = min(QUIET_SAMPLES, len(samples))
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    return int(np.argmin(energy[length:] - energy[:-length])) + length // 2
