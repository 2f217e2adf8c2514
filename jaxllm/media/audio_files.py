"""Reads files of audio as mono samples at 16 kHz. WAV needs nothing else; other formats need the package soundfile."""

import io
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.media.options import MediaOptions
from jaxllm.media.resampling import resample

MIN_RATE, MAX_RATE = 1000, 192_000
"""Samples of a second that a file may have."""
MAX_CHANNELS = 32
MAX_SAMPLE = 1e6
"""Files of floating point may have samples beyond 1, as far as features stay finite."""
BLOCK_SAMPLES = 1 << 16
"""Decoded at a time of each channel: a small file may hold hours of silence in many channels."""
MAX_CHUNKS = 1 << 12
"""Chunks of a WAV file before its samples; files have a few."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


ToFloat = Callable[[np.ndarray], np.ndarray]


def _as_float(samples: np.ndarray) -> np.ndarray:
    return samples.astype(np.float32)


def refuse(name: str, fault: str) -> NoReturn:
    """Raise the error of the audio that is called `name`; `fault` goes on after it."""
    raise InvalidRequestError(f"the audio at {name} {fault}", name) from None


def read_audio(data: bytes, name: str, options: MediaOptions, heard: float = math.inf) -> np.ndarray:
    """Float32 samples of a file, from -1 to 1. heard: most seconds that the model takes. Raises InvalidRequestError."""
    if not data:
        refuse(name, "is empty; send the bytes of a file")
    if len(data) > options.mm_max_audio_bytes:
        refuse(
            name,
            f"has {len(data)} bytes, at most {options.mm_max_audio_bytes} are taken (--mm-max-audio-bytes); send a shorter or a "
            "compressed one",
        )
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE" and (found := _read_wav(data, name)) is not None:
        samples, rate, to_float = found
        return resampled(samples, rate, name, options, to_float, heard)
    return _read_with_soundfile(data, name, options, heard)


def resampled(
    samples: np.ndarray, rate: int, name: str, options: MediaOptions, to_float: ToFloat = _as_float, heard: float = math.inf
) -> np.ndarray:
    """Float32 [n] at 16 kHz of samples [n] or [n, channels], whose channels are averaged. to_float: makes float32 from -1 to 1 of some of
    them. heard: most seconds that the model takes. Raises InvalidRequestError."""
    check_rate(rate, name)
    if samples.ndim > 2 or (samples.ndim == 2 and not 1 <= samples.shape[1] <= MAX_CHANNELS):
        refuse(name, f"is an array of shape {samples.shape}, must have samples, or samples and at most {MAX_CHANNELS} channels")
    if not len(samples):
        refuse(name, "has no samples")
    _check_length(len(samples), rate, name, options, heard)
    parts = (to_float(samples[start : start + BLOCK_SAMPLES]) for start in range(0, len(samples), BLOCK_SAMPLES))
    return _joined((_mono(part) for part in parts), rate, name)


def _mono(samples: np.ndarray) -> np.ndarray:
    return samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)


def _check_length(count: int, rate: int, name: str, options: MediaOptions, heard: float) -> None:
    if count > options.mm_max_audio_seconds * rate:
        refuse(
            name,
            f"has {count / rate:.1f} seconds, at most {options.mm_max_audio_seconds} are taken (--mm-max-audio-seconds); cut it",
        )
    if count > heard * rate:
        refuse(name, f"has more than {heard:g} seconds, which this model hears of a clip; cut it into several")


def _joined(blocks: Iterable[np.ndarray], rate: int, name: str) -> np.ndarray:
    """Float32 [n] at 16 kHz of mono blocks that follow each other. Raises InvalidRequestError."""

    def checked() -> Iterator[np.ndarray]:
        for block in blocks:
            if not (block.min() >= -MAX_SAMPLE and block.max() <= MAX_SAMPLE):  # as where one is not a number
                refuse(name, f"has samples that are not finite, or beyond {MAX_SAMPLE:g}")
            yield block

    return np.concatenate([*resample(checked(), rate)])


def check_rate(rate: Any, name: str) -> None:
    """Raise InvalidRequestError for a rate that cannot be that of speech."""
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)) or not MIN_RATE <= rate <= MAX_RATE:
        refuse(name, f"has a rate of {rate!r} samples a second, must be an integer from {MIN_RATE} to {MAX_RATE}")


def _read_wav(data: bytes, name: str) -> tuple[np.ndarray, int, ToFloat] | None:
    """Samples [n, channels] as they are in a WAV file, its rate, and what makes float32 of samples; None: they are in a form that
    is not read here."""
    form: tuple[int, int, int, int] | None = None
    place = 12
    for _ in range(MAX_CHUNKS):
        if place + 8 > len(data):
            break
        kind, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        part = memoryview(data)[place + 8 : place + 8 + size]  # a stream of unknown length says too much
        place += 8 + size + size % 2
        if kind == b"fmt " and len(part) >= 16:
            code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", part)
            form = (int.from_bytes(part[24:26], "little") if code == _EXTENSIBLE else code, channels, rate, bits)
        elif kind == b"data":
            if form is None:
                break
            code, channels, rate, bits = form
            if not 1 <= channels <= MAX_CHANNELS:
                refuse(name, f"has {channels} channels, must have 1 to {MAX_CHANNELS}")
            if (code, bits) not in _FORMS:
                return None
            width, (dtype, to_float) = bits // 8 * channels, _FORMS[code, bits]
            return np.frombuffer(part[: len(part) // width * width], dtype).reshape(-1, channels), rate, to_float
    refuse(name, "is a WAV file without samples, or a damaged one")


def _scaled(scale: float) -> ToFloat:
    return lambda samples: samples.astype(np.float32) / np.float32(scale)


def _of_24_bits(samples: np.ndarray) -> np.ndarray:
    wide = np.zeros((*samples.shape, 4), np.uint8)
    wide[..., 1:] = samples[..., None].view(np.uint8)
    return _scaled(2.0**31)(wide.view("<i4")[..., 0])


_FORMS: dict[tuple[int, int], tuple[str, ToFloat]] = {
    (_PCM, 8): ("u1", lambda samples: _scaled(128)(samples) - np.float32(1)),
    (_PCM, 16): ("<i2", _scaled(2.0**15)),
    (_PCM, 24): ("V3", _of_24_bits),
    (_PCM, 32): ("<i4", _scaled(2.0**31)),
    (_FLOAT, 32): ("<f4", _as_float),
    (_FLOAT, 64): ("<f8", _as_float),
}
"""By the code of the form and the bits of a sample."""


def _read_with_soundfile(data: bytes, name: str, options: MediaOptions, heard: float) -> np.ndarray:
    """Float32 [n] at 16 kHz of a file of any format that libsndfile knows."""
    try:
        import soundfile
    except (ImportError, OSError):
        refuse(
            name,
            "is no WAV file of plain samples, and other formats (FLAC, Ogg, MP3) are read by the package soundfile, which is not installed "
            "here: send WAV, or install jaxllm[audio] on the server",
        )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            check_rate(file.samplerate, name)
            if file.channels > MAX_CHANNELS:
                refuse(name, f"has {file.channels} channels, must have 1 to {MAX_CHANNELS}")
            rate, count = file.samplerate, 0

            def blocks() -> Iterator[np.ndarray]:
                nonlocal count
                most = int(min(options.mm_max_audio_seconds, heard) * rate) + 1  # the header may lie: so much is decoded
                while len(block := file.read(min(most - count, BLOCK_SAMPLES), dtype="float32", always_2d=True)):
                    count += len(block)
                    _check_length(count, rate, name, options, heard)
                    yield _mono(block)
                if not count:
                    refuse(name, "has no samples")

            return _joined(blocks(), rate, name)
    except InvalidRequestError:
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError):
        refuse(name, "cannot be read; send WAV, FLAC, Ogg or MP3")
