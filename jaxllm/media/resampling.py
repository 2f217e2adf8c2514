"""Resamples audio to 16 kHz block by block, so that hours of it take no more memory than their result. Imports SciPy when it runs."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from jaxllm.model_parts.audio import SAMPLE_RATE

STEP_SAMPLES = 1 << 19
"""Samples that are resampled at once, about; more where the filter has more taps."""
_HALF_TAPS, _BETA = 10, 5.0
"""The filter of `scipy.signal.resample_poly`: a Kaiser window over so many samples of the lower rate to each side."""


def resample(blocks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Float32 samples at 16 kHz of mono float32 blocks at `rate`, which follow each other: as `scipy.signal.resample_poly` makes them of
    all together."""
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    from scipy.signal import firwin, resample_poly  # takes long to import

    divisor = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // divisor, rate // divisor
    reach = _HALF_TAPS * max(up, down)
    window = firwin(2 * reach + 1, 1 / max(up, down), window=("kaiser", _BETA)).astype(np.float32)
    # Blocks begin at multiples of `down`, where a sample of the result lies, and overlap by the filter's reach.
    overlap = -(-(reach // up + 1) // down) * down
    step = -(-max(STEP_SAMPLES, len(window)) // down) * down  # each call goes through the window, which odd rates make long

    def resampled(samples: np.ndarray) -> np.ndarray:
        return np.asarray(resample_poly(samples, up, down, window=window), np.float32)

    waiting, done = np.zeros(0, np.float32), 0
    """Samples that are still needed, and how many of them have been resampled."""
    for block in blocks:
        waiting = np.concatenate([waiting, block])
        while len(waiting) >= (end := done + step) + overlap:
            yield resampled(waiting[: end + overlap])[done * up // down : end * up // down]
            first = end - overlap if end > overlap else 0
            waiting, done = waiting[first:], end - first
    if len(waiting):
        yield resampled(waiting)[done * up // down :]
