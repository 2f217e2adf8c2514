"""Features of audio for an encoder: the logarithms of the energy at mel frequencies over time. NumPy only.

As transformers' WhisperFeatureExtractor computes them. Source of the mel scale: M. Slaney, "Auditory Toolbox", 1998.
"""

import functools
import struct

import numpy as np

from jaxllm.model_parts.audio import HOP, SAMPLE_RATE, Audio

WINDOW = 400
"""Samples of a frame."""
_LINEAR_HERTZ, _LINEAR_MEL = 1000.0, 15.0
"""The mel scale is linear up to here."""
_MEL_STEP = 27.0 / np.log(6.4)
"""Mels for a factor of e above that."""
_SMALL_PRODUCT = 2**18
"""Multiplications of a matrix product that OpenBLAS computes in the thread that asks. It splits larger ones over all cores, and the
threads that wait spin: on 16 cores the mel product of a clip then takes 240 ms of CPU time instead of 6, and one clip waits for another."""


def log_mel(samples: np.ndarray, audio: Audio) -> np.ndarray:
    """Float32 [frames, bins] of mono samples at 16 kHz, float32 from -1 to 1; silence follows what is shorter than a clip, and what is
    longer is cut."""
    padded = np.zeros(audio.num_samples, np.float64)
    count = min(len(samples), len(padded))
    padded[:count] = samples[:count]
    padded = np.pad(padded, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][: audio.num_frames]
    power = np.abs(np.fft.rfft(frames * _hann()).astype(np.complex64), dtype=np.float64) ** 2
    energy = _in_one_thread(power, mel_filters(audio.num_bins))
    logs = np.log10(np.maximum(energy, 1e-10)).astype(np.float32)
    logs = np.maximum(logs, logs.max() - np.float32(8))
    return (logs + np.float32(4)) / np.float32(4)


def _in_one_thread(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product, computed for few rows at a time."""
    num_rows = max(1, _SMALL_PRODUCT // right.size)
    found = np.empty((len(left), right.shape[1]), right.dtype)
    for first in range(0, len(left), num_rows):
        rows = slice(first, first + num_rows)
        np.matmul(left[rows], right, out=found[rows])
    return found


@functools.cache
def _hann() -> np.ndarray:
    """The periodic window."""
    return np.hanning(WINDOW + 1)[:-1]


@functools.cache
def mel_filters(num_bins: int) -> np.ndarray:
    """Float64 [frequencies, bins]: triangles over the frequencies, of equal area."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), num_bins + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    distances = edges - frequencies[:, None]
    widths = np.diff(edges)
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))


def _mel(hertz: float) -> float:
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HERTZ) * _MEL_STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    above = _LINEAR_HERTZ * np.exp((mels - _LINEAR_MEL) / _MEL_STEP)
    return np.where(mels < _LINEAR_MEL, mels * _LINEAR_HERTZ / _LINEAR_MEL, above)


def payload_bytes(audio: Audio) -> int:
    """Bytes of the features of a clip."""
    return 4 * audio.num_frames * audio.num_bins


def pack(features: np.ndarray) -> bytes:
    """The bytes of features float32 [frames, bins], as they travel to the engine."""
    return np.ascontiguousarray(features, "<f4").tobytes()


def unpack(payload: bytes, audio: Audio) -> np.ndarray:
    """The features in these bytes, read-only: a view of them."""
    return np.frombuffer(payload, "<f4").reshape(audio.num_frames, audio.num_bins)


_SEEN_BEHIND = 2
"""Frames behind a clip that the convolutions of its last position see."""


def num_frames(num_samples: int) -> int:
    """Frames of features of so many samples, without silence behind them."""
    return -(-num_samples // HOP)


def pack_part(features: np.ndarray, count: int) -> bytes:
    """The bytes of the first `count` frames, and of those behind that the encoder sees with them: their number (int32), then float32."""
    return struct.pack("<i", count) + pack(features[: count + _SEEN_BEHIND])


def unpack_part(payload: bytes, audio: Audio) -> tuple[np.ndarray, int]:
    """What `pack_part` has packed: float32 [frames, bins], a view, and the number of the clip's own frames."""
    (count,) = struct.unpack_from("<i", payload)
    return np.frombuffer(payload, "<f4", offset=4).reshape(-1, audio.num_bins), count
