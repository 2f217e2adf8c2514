"""Reads files of audio as mono samples at 16 kHz. WAV needs nothing else; other formats need the package soundfile."""

import io
import math
import struct
from typing import Any, NoReturn

import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.media.options import MediaOptions
from jaxllm.model_parts.audio import SAMPLE_RATE

MIN_RATE, MAX_RATE = 1000, 192_000
"""Samples of a second that a file may have."""
MAX_CHANNELS = 32
MAX_SAMPLE = 1e6
"""Files of floating point may have samples beyond 1, as far as features stay finite."""
BLOCK_SAMPLES = 1 << 16
"""Decoded at a time of each channel: a small file may hold hours of silence in many channels."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


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
        samples, rate = found
    else:
        samples, rate = _read_with_soundfile(data, name, min(heard, options.mm_max_audio_seconds))
    return resampled(samples, rate, name, options, heard)


def resampled(samples: np.ndarray, rate: int, name: str, options: MediaOptions, heard: float = math.inf) -> np.ndarray:
    """Float32 [n] at 16 kHz of samples [n] or [n, channels], whose channels are averaged. heard: most seconds that the model takes. Raises
    InvalidRequestError."""
    check_rate(rate, name)
    if samples.ndim > 2 or (samples.ndim == 2 and not 1 <= samples.shape[1] <= MAX_CHANNELS):
        refuse(name, f"is an array of shape {samples.shape}, must have samples, or samples and at most {MAX_CHANNELS} channels")
    if not len(samples):
        refuse(name, "has no samples")
    if len(samples) > options.mm_max_audio_seconds * rate:
        refuse(
            name,
            f"has {len(samples) / rate:.1f} seconds, at most {options.mm_max_audio_seconds} are taken (--mm-max-audio-seconds); cut it",
        )
    if len(samples) > heard * rate:
        refuse(name, f"has more than {heard:g} seconds, which this model hears of a clip; cut it into several")
    mono = samples.astype(np.float32) if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    if not (mono.min() >= -MAX_SAMPLE and mono.max() <= MAX_SAMPLE):  # as where one is not a number
        refuse(name, f"has samples that are not finite, or beyond {MAX_SAMPLE:g}")
    if rate == SAMPLE_RATE:
        return mono
    from scipy.signal import resample_poly  # takes long to import

    divisor = math.gcd(rate, SAMPLE_RATE)
    return np.asarray(resample_poly(mono, SAMPLE_RATE // divisor, rate // divisor), np.float32)


def check_rate(rate: Any, name: str) -> None:
    """Raise InvalidRequestError for a rate that cannot be that of speech."""
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)) or not MIN_RATE <= rate <= MAX_RATE:
        refuse(name, f"has a rate of {rate!r} samples a second, must be an integer from {MIN_RATE} to {MAX_RATE}")


def _read_wav(data: bytes, name: str) -> tuple[np.ndarray, int] | None:
    """Samples [n, channels] and rate of a WAV file; None: its samples are in a form that is not read here."""
    form: tuple[int, int, int, int] | None = None
    place = 12
    while place + 8 <= len(data):
        kind, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        part = data[place + 8 : place + 8 + size]  # a stream of unknown length says too much
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
            if (code, bits) not in _DECODERS:
                return None
            width = bits // 8 * channels
            samples = _DECODERS[code, bits](part[: len(part) // width * width])
            return samples.reshape(-1, channels), rate
    refuse(name, "is a WAV file without samples, or a damaged one")


def _integers(data: bytes, dtype: str, scale: float) -> np.ndarray:
    return np.frombuffer(data, dtype).astype(np.float32) / np.float32(scale)


def _of_24_bits(data: bytes) -> np.ndarray:
    wide = np.zeros((len(data) // 3, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return _integers(wide.tobytes(), "<i4", 2.0**31)


_DECODERS: dict[tuple[int, int], Any] = {
    (_PCM, 8): lambda data: _integers(data, "u1", 128) - np.float32(1),
    (_PCM, 16): lambda data: _integers(data, "<i2", 2.0**15),
    (_PCM, 24): _of_24_bits,
    (_PCM, 32): lambda data: _integers(data, "<i4", 2.0**31),
    (_FLOAT, 32): lambda data: _integers(data, "<f4", 1),
    (_FLOAT, 64): lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}
"""By the code of the form and the bits of a sample."""


def _read_with_soundfile(data: bytes, name: str, max_seconds: float) -> tuple[np.ndarray, int]:
    """Samples [n], the means of all channels, and rate of a file of any format that libsndfile knows. Little more than `max_seconds` is
    decoded."""
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
            left = int(max_seconds * file.samplerate) + 1  # the header may lie: so much is decoded
            blocks = [np.zeros(0, np.float32)]
            while len(block := file.read(min(left, BLOCK_SAMPLES), dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1))
                left -= len(block)
            return np.concatenate(blocks), file.samplerate
    except InvalidRequestError:
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError):
        refuse(name, "cannot be read; send WAV, FLAC, Ogg or MP3")
