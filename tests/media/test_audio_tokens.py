"""Clips in place of tokens: how many there are, what travels to the engine, and where they stand in prompts."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media import Media, MediaOptions
from jaxllm.media.audio_tokens import AudioTokenProcessor
from jaxllm.media.features import log_mel, unpack_part
from jaxllm.model_parts import MLP, Audio, AudioTokens, MergerLinear
from tests.helpers import whisper_checkpoint

PLACEHOLDER = 9
TOKENS = AudioTokens(PLACEHOLDER, "<|audio|>", "projector.", (MergerLinear("projector.linear", 64),), num_averaged=2)
AUDIO = Audio(80, 50, 64, 2, 2, MLP(96), tokens=TOKENS)
"""Clips of a second."""


def processor(**options: object) -> AudioTokenProcessor:
    return AudioTokenProcessor(AUDIO, MediaOptions(**options))  # type: ignore[arg-type]


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, count).astype(np.float32)


def hf_counts(count: int) -> tuple[int, int]:
    """Frames and tokens of so many samples, by transformers' formulas."""
    num_frames = -(-count // 160)
    return num_frames, ((num_frames - 1) // 2 + 1 - 2) // 2 + 1


@pytest.mark.parametrize("count", [321, 480, 640, 641, 961, 8000, 15_679, 15_681, 15_999, 16_000])
def test_a_clip_has_as_many_tokens_as_in_transformers(count: int) -> None:
    found = processor().process(Media("audio", noise(count)))
    num_frames, num_tokens = hf_counts(count)
    assert found.token_ids == (PLACEHOLDER,) * num_tokens and found.num_embeddings == num_tokens > 0
    features, own = unpack_part(found.payload, AUDIO)
    assert own == num_frames and len(features) == min(num_frames + 2, 100)
    assert np.array_equal(features, log_mel(noise(count), AUDIO)[: len(features)])


@pytest.mark.slow
def test_frames_are_counted_as_in_transformers() -> None:
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    for count in (321, 640, 641, 8000, 15_999, 16_000):
        made = extract(noise(count), sampling_rate=16000, padding="max_length", return_attention_mask=True, device="cpu")
        features, own = unpack_part(processor().process(Media("audio", noise(count))).payload, AUDIO)
        assert own == np.asarray(made.attention_mask).sum()
        np.testing.assert_allclose(features, np.asarray(made.input_features[0]).T[: len(features)], atol=1e-6)


def test_clips_stand_at_their_placeholders() -> None:
    prepare = processor()
    long, short = (prepare.process(Media("audio", noise(count))) for count in (3200, 641))
    assert (long.num_tokens, short.num_tokens) == (5, 1)
    prompt = [1, PLACEHOLDER, 2, PLACEHOLDER, 3]
    once, items = prepare.expand(prompt, [long, short])
    assert once == [1, *[PLACEHOLDER] * 5, 2, PLACEHOLDER, 3]
    assert [(item.kind, item.position, item.num_tokens, item.grid) for item in items] == [
        ("audio", 1, 5, None),
        ("audio", 7, 1, None),
    ]
    assert prepare.expand(once, [long, short]) == (once, items), "they may be there already"
    assert prepare.expand([1, 2], []) == ([1, 2], ())
    for clips in ([], [long], [long, short, short]):
        with pytest.raises(InvalidRequestError, match=rf"has 2 audio placeholder\(s\) \(token 9\) and {len(clips)} clip"):
            prepare.expand(prompt, clips)


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (noise(16_001), "has more than 1 seconds, which this model hears of a clip; cut it into several"),
        (noise(320), r"has 0.0200 seconds, too few for this model, which hears 0.0201 at least"),
        (noise(0), "has no samples"),
        (np.full(800, np.nan, np.float32), "has samples that are not finite"),
    ],
)
def test_clips_of_a_wrong_length_are_refused(samples: np.ndarray, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        processor().process(Media("audio", samples))


def test_seconds_are_counted_at_the_rate_of_the_file() -> None:
    with pytest.raises(InvalidRequestError, match="has more than 1 seconds"):
        processor().process(Media("audio", whisper_checkpoint.wav(noise(8_001), 8_000)))
    assert processor().process(Media("audio", whisper_checkpoint.wav(noise(44_100), 44_100))).num_tokens == 25
    assert processor().process(Media("audio", whisper_checkpoint.wav(noise(16_000)))).num_tokens == 25


def test_settings_of_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="mm_processor_kwargs has no settings for audio"):
        processor(mm_processor_kwargs={"max_pixels": 4})
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs has no settings for audio"):
        processor().process(Media("audio", noise(800)), {"max_pixels": 4})
