"""Audio of prompts: files, rates, features, cuts."""

import io
import math
import struct
import sys
import tracemalloc
import wave
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media, MediaOptions
from jaxllm.media.audio_clips import cut
from jaxllm.media.audio_files import BLOCK_SAMPLES, read_audio, resampled
from jaxllm.media.features import HOP, WINDOW, log_mel, mel_filters, payload_bytes, unpack
from jaxllm.media.resampling import resample
from jaxllm.media.speech import SpeechProcessor
from jaxllm.model_parts import MLP, Audio

AUDIO = Audio(80, 50, 64, 2, 2, MLP(96))
OPTIONS = MediaOptions(mm_max_audio_bytes=400_000, mm_max_audio_seconds=4)
TONE = (0.5 * np.sin(np.arange(8000) / 7)).astype(np.float32)


def wav(code: int, bits: int, data: bytes, *, rate: int = 16000, channels: int = 1, extensible: bool = False) -> bytes:
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * width, width, bits)
    if extensible:
        form += struct.pack("<HHIH14x", 22, bits, 0, code)
    chunks = (
        b"fmt " + struct.pack("<I", len(form)) + form + b"LIST\x03\0\0\0abc\0" + b"data" + struct.pack("<I", len(data)) + data
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def of_24_bits(samples: np.ndarray) -> bytes:
    return b"".join(int(value).to_bytes(3, "little", signed=True) for value in samples * (2**23 - 1))


FORMS = {
    "u8": (1, 8, (np.round(TONE * 127) + 128).astype("u1").tobytes(), 1e-2),
    "s16": (1, 16, (TONE * 32767).astype("<i2").tobytes(), 1e-4),
    "s24": (1, 24, of_24_bits(TONE), 1e-6),
    "s32": (1, 32, (TONE.astype(np.float64) * (2**31 - 1)).astype("<i4").tobytes(), 1e-6),
    "f32": (3, 32, TONE.astype("<f4").tobytes(), 0),
    "f64": (3, 64, TONE.astype("<f8").tobytes(), 0),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("extensible", [False, True])
def test_wav_files_are_read(name: str, extensible: bool) -> None:
    code, bits, data, tolerance = FORMS[name]
    found = read_audio(wav(code, bits, data, extensible=extensible), "a", OPTIONS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, TONE, atol=tolerance + 1e-9)


def test_files_of_the_standard_library_and_of_several_channels_are_read() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((2, 2, 16000, 0, "NONE", ""))
        writer.writeframes(np.array([[1000, 3000], [-2, 4]], "<i2").tobytes())
    np.testing.assert_allclose(read_audio(file.getvalue(), "a", OPTIONS), np.array([2000, 1]) / 32768)


def test_a_stream_of_unknown_length_is_read_to_its_end() -> None:
    data = wav(*FORMS["s16"][:3])
    place = data.index(b"data") + 4
    assert len(read_audio(data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :], "a", OPTIONS)) == len(TONE)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 15999])
def test_blocks_are_resampled_as_the_whole(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.signal import resample_poly

    monkeypatch.setattr("jaxllm.media.resampling.STEP_SAMPLES", 5000)
    rng, divisor = np.random.default_rng(rate), math.gcd(rate, 16000)
    for count in (1, 17, 4999, 30_001):
        samples = rng.normal(size=count).astype(np.float32)
        cuts = sorted(rng.integers(0, count, 5))
        expected = resample_poly(samples, 16000 // divisor, rate // divisor)
        found = np.concatenate([*resample([part for part in np.split(samples, cuts) if len(part)], rate)])
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_an_odd_rate_does_not_go_through_its_long_filter_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.signal import resample_poly

    monkeypatch.setattr("jaxllm.media.resampling.STEP_SAMPLES", 5000)
    samples = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)
    found = [*resample(np.split(samples, 10), 15999)]
    assert 1 < len(found) <= 4
    np.testing.assert_allclose(np.concatenate(found), resample_poly(samples, 16000, 15999), atol=2e-6)


def test_a_wav_file_of_chunks_alone_is_refused_soon() -> None:
    data = wav(*FORMS["s16"][:3])
    place = data.index(b"data")
    for count in (10, 5000):
        many = data[:place] + b"junk\0\0\0\0" * count + data[place:]
        if count == 10:
            assert len(read_audio(many, "a", OPTIONS)) == len(TONE)
        else:
            with pytest.raises(InvalidRequestError, match="a WAV file without samples, or a damaged one"):
                read_audio(many, "a", OPTIONS)


def test_long_audio_takes_little_memory() -> None:
    """Two minutes of 48 kHz in stereo: 11.5 million samples, of which the result keeps 1.9 million."""
    samples = np.zeros((48000 * 120, 2), np.int16)
    data = wav(1, 16, samples.tobytes(), rate=48000, channels=2)
    tracemalloc.start()
    try:
        found = read_audio(data, "a", MediaOptions(mm_max_audio_bytes=1 << 30))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 16000 * 120 and most < 3 * found.nbytes, f"{most >> 20} MiB"


@pytest.mark.parametrize(("rate", "count"), [(8000, 4000), (22050, 11025), (44100, 22050), (48000, 24000)])
def test_other_rates_are_resampled(rate: int, count: int) -> None:
    time = np.arange(count) / rate
    found = resampled(np.sin(2 * np.pi * 440 * time).astype(np.float32), rate, "a", OPTIONS)
    assert len(found) == 8000 and found.dtype == np.float32
    middle = slice(500, -500)
    np.testing.assert_allclose(found[middle], np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)[middle], atol=5e-3)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"x" * 400_001, "has 400001 bytes, at most 400000"),
        (b"OggS and more", "is no WAV file of plain samples"),
        (wav(1, 16, b"")[:20], "damaged"),
        (wav(1, 16, b""), "has no samples"),
        (wav(2, 4, b"abcd"), "is no WAV file of plain samples"),
        (wav(1, 16, b"ab" * 9, channels=0), "has 0 channels"),
        (wav(1, 16, b"ab" * 9, channels=40), "has 40 channels"),
        (wav(1, 16, b"ab" * 9, rate=3), "has a rate of 3"),
        (wav(1, 8, b"a" * 64001), "has 4.0 seconds, at most 4"),
        (wav(3, 32, np.array([np.nan], "<f4").tobytes()), "not finite"),
        (wav(3, 32, np.array([3e38, -3e38] * 999, "<f4").tobytes()), "not finite, or beyond 1e.06"),
    ],
)
def test_bad_files_are_refused(data: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InvalidRequestError, match=told) as caught:
        read_audio(data, "file", OPTIONS)
    assert caught.value.param == "file"


def test_other_formats_are_decoded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are limited, channels and rate hardly: a small file may decode to gigabytes."""
    left, right = np.random.default_rng(0).normal(0, 0.1, (2, 150_000)).astype(np.float32)
    sizes = []

    class SoundFile:
        """soundfile's, over an array."""

        samplerate, channels = 48000, 2

        def __init__(self, file: io.BytesIO):
            self._rest = np.stack([left, right], axis=1)

        def __enter__(self) -> "SoundFile":
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def read(self, frames: int, dtype: str, always_2d: bool) -> np.ndarray:
            sizes.append(frames)
            found, self._rest = self._rest[:frames], self._rest[frames:]
            return found

    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=SoundFile, SoundFileError=OSError))
    found = read_audio(b"OggS and more", "a", OPTIONS)
    np.testing.assert_array_equal(found, resampled((left + right) / 2, 48000, "a", OPTIONS))
    assert max(sizes) <= BLOCK_SAMPLES
    with pytest.raises(InvalidRequestError, match="has 3.0 seconds, at most 3 are taken"):
        read_audio(b"OggS and more", "a", replace(OPTIONS, mm_max_audio_seconds=3))
    assert sum(sizes) < 150_000 + 5 * BLOCK_SAMPLES


def test_features_are_those_of_a_naive_transform() -> None:
    found = log_mel(TONE, AUDIO)
    assert found.shape == (100, 80) and found.dtype == np.float32
    padded = np.pad(np.pad(TONE.astype(np.float64), (0, 8000)), WINDOW // 2, mode="reflect")
    turns = np.exp(-2j * np.pi * np.outer(np.arange(WINDOW), np.arange(WINDOW // 2 + 1)) / WINDOW)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.array([np.abs((padded[i * HOP : i * HOP + WINDOW] * hann) @ turns) ** 2 for i in range(100)])
    logs = np.log10(np.maximum(power @ mel_filters(80), 1e-10))
    np.testing.assert_allclose(found, (np.maximum(logs, logs.max() - 8) + 4) / 4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_bins", [80, 128])
def test_features_are_those_of_transformers(num_bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor(feature_size=num_bins)
    audio = Audio(num_bins, 1500, 64, 2, 2, MLP(96))
    noise = np.random.default_rng(0).normal(0, 0.1, 600_000).astype(np.float32)
    for samples in (noise[:100], noise[:80_000], noise[:480_000], noise):
        wanted = np.asarray(extract(samples, sampling_rate=16000, device="cpu").input_features[0]).T
        np.testing.assert_allclose(log_mel(samples, audio), wanted, atol=1e-6)


def test_long_audio_is_cut_where_it_is_quiet() -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, 40_000).astype(np.float32)
    samples[14_000:16_000] = 0
    first, *others = cut(samples, 20_000)
    assert 14_700 <= len(first.samples) <= 15_300
    assert np.array_equal(np.concatenate([first.samples, *(clip.samples for clip in others)]), samples)
    assert all(0 < len(clip.samples) <= 20_000 for clip in others)
    assert others[0].start == first.seconds
    assert [len(clip.samples) for clip in cut(samples[:20_000], 20_000)] == [20_000]


class TestAudioProcessor:
    def made(self, **options: Any) -> SpeechProcessor:
        return SpeechProcessor(AUDIO, MediaOptions(**options))

    def test_samples_and_files_give_features_that_are_kept(self) -> None:
        processor = self.made()
        found = processor.process(Media("audio", (TONE, 16000)))
        assert len(found.payload) == payload_bytes(AUDIO)
        assert np.array_equal(unpack(found.payload, AUDIO), log_mel(TONE, AUDIO))
        assert processor.process(Media("audio", (TONE, 16000))) is found
        assert processor.process(Media("audio", (TONE[:-1], 16000))).content_hash != found.content_hash

    def test_a_file_that_was_kept_is_not_decoded_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processor, file = self.made(), wav(*FORMS["f32"][:3])
        found = processor.process(Media("audio", file))
        assert np.array_equal(unpack(found.payload, AUDIO), log_mel(TONE, AUDIO))
        monkeypatch.setattr("jaxllm.media.audio.read_audio", None)
        assert processor.process(Media("audio", file)) is found

    def test_integers_are_scaled_by_their_type(self) -> None:
        wide = (TONE * 32767).astype(np.int16)
        np.testing.assert_allclose(self.made().samples(Media("audio", (wide, 16000))), TONE, atol=1e-4)
        np.testing.assert_allclose(self.made().samples(Media("audio", np.full(3, 128, np.uint8))), 0)

    def test_a_uuid_stands_for_what_was_sent_with_it(self) -> None:
        processor = self.made()
        first = processor.process(Media("audio", (TONE, 16000), uuid="a"))
        assert processor.process(Media("audio", None, uuid="a")) is first
        with pytest.raises(InvalidRequestError, match="no audio of that uuid"):
            processor.process(Media("audio", None, uuid="b"))

    @pytest.mark.parametrize(
        ("data", "told"),
        [
            ((np.zeros(16001, np.float32), 16000), "has 1.0 seconds, this model hears 1 at a time"),
            ((TONE, 16000.0), "has a rate of 16000.0"),
            ((TONE.astype(complex), 16000), "must be the bytes of a file, or an array"),
            (3, "is a int, must be"),
            (np.zeros((2, 3, 4)), "is an array of shape"),
        ],
    )
    def test_other_things_are_refused(self, data: Any, told: str) -> None:
        with pytest.raises(InvalidRequestError, match=told):
            self.made().process(Media("audio", data))
        with pytest.raises(InvalidRequestError, match="of kind image"):
            self.made().process(Media("image", data))

    def test_a_prompt_has_one_clip(self) -> None:
        processor = self.made()
        clip = processor.process(Media("audio", (TONE, 16000)))
        token_ids, (item,) = processor.expand([5, 6, 7], [clip])
        assert token_ids == [5, 6, 7] and (item.kind, item.position, item.payload) == ("audio", 0, clip.payload)
        for clips in ([], [clip, clip]):
            with pytest.raises(InvalidRequestError, match=f"has {len(clips)} clips of audio; this model needs 1"):
                processor.expand([5], clips)
