"""Prompts of Whisper, and times from the tokens of its answers."""

import pytest
from tokenizers import Tokenizer as Backend

from jaxllm.errors import InvalidRequestError
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.text.transcripts import Segment, TranscriptTokens, as_srt, as_vtt
from tests.helpers import whisper_checkpoint
from tests.helpers.whisper_checkpoint import ENGLISH, EOS, FIRST_TIMESTAMP, NO_SPEECH, NO_TIMESTAMPS, START, TRANSCRIBE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(whisper_checkpoint.write(tmp_path_factory.mktemp("whisper") / "model"))


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> TranscriptTokens:
    return TranscriptTokens.of(tokenizer, is_multilingual=True)


def text(tokenizer: Tokenizer, words: str) -> list[int]:
    return tokenizer.encode(words, add_special_tokens=False)


def test_prompts_say_language_task_and_times(tokens: TranscriptTokens) -> None:
    assert set(tokens.languages) == {"en", "de"}
    plain = tokens.prompt(language=None, task="transcribe", with_timestamps=False)
    assert plain == [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
    timed = tokens.prompt(language="de", task="translate", with_timestamps=True)
    assert timed == [START, ENGLISH + 1, TRANSCRIBE - 1, FIRST_TIMESTAMP]
    assert tokens.language_of(ENGLISH + 1) == "de"


def test_earlier_text_comes_first_as_far_as_it_fits(tokenizer: Tokenizer, tokens: TranscriptTokens) -> None:
    asked = {"language": "en", "task": "transcribe", "with_timestamps": False, "previous": "  abc def "}
    ids = text(tokenizer, " abc def")
    assert tokens.prompt(**asked, max_previous=100) == [tokens.previous, *ids, START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
    assert tokens.prompt(**asked, max_previous=3)[:4] == [tokens.previous, *ids[-3:]]


def test_silence_is_asked_behind_the_start_and_earlier_text(tokenizer: Tokenizer, tokens: TranscriptTokens) -> None:
    prompt = tokens.prompt(language="en", task="transcribe", with_timestamps=True, previous="ab", max_previous=9)
    assert tokens.until_start(prompt) == [tokens.previous, *text(tokenizer, " ab"), START]
    assert tokens.no_speech == NO_SPEECH
    older = Tokenizer(Backend.from_str(tokenizer.to_json().replace("<|nospeech|>", "<|nocaptions|>")))
    assert TranscriptTokens.of(older, is_multilingual=True).no_speech == NO_SPEECH
    without = Tokenizer(Backend.from_str(tokenizer.to_json().replace("<|nospeech|>", "<|other|>")))
    assert TranscriptTokens.of(without, is_multilingual=True).no_speech is None


def test_a_model_of_english_is_asked_for_no_language(tokenizer: Tokenizer) -> None:
    english = TranscriptTokens.of(tokenizer, is_multilingual=False)
    assert english.prompt(language="en", task="transcribe", with_timestamps=False) == [START, NO_TIMESTAMPS]
    english.check("en", "transcribe")
    for language, task in (("de", "transcribe"), (None, "translate")):
        with pytest.raises(InvalidRequestError, match="English alone|knows en alone"):
            english.check(language, task)


def test_unknown_languages_and_tokenizers_are_refused(tokens: TranscriptTokens) -> None:
    with pytest.raises(InvalidRequestError, match="language is 'xx', must be one of de, en"):
        tokens.check("xx", "transcribe")
    bare = Tokenizer(Backend.from_str(tokens.tokenizer.to_json().replace("<|notimestamps|>", "<|other|>")))
    with pytest.raises(InvalidRequestError, match="no token <|notimestamps|>"):
        TranscriptTokens.of(bare, is_multilingual=True)


def test_segments_lie_between_times(tokenizer: Tokenizer, tokens: TranscriptTokens) -> None:
    def at(seconds: float) -> int:
        return FIRST_TIMESTAMP + round(seconds * 50)

    one, two, three = (text(tokenizer, words) for words in (" one", " two", " three"))
    answer = [*one, at(0.3), at(0.4), *two, at(0.5), at(0.5), *three, EOS]
    found = tokens.segments(answer, 10.0, 0.9)
    assert found == [
        Segment(10.0, 10.3, " one", one),
        Segment(10.4, 10.5, " two", two),
        Segment(10.5, 10.9, " three", three),
    ]
    backwards = tokens.segments([at(0.6), *one, at(0.2), EOS], 0.0, 0.9)
    assert backwards == [Segment(0.6, 0.6, " one", one)], "a segment never ends before it begins"
    assert tokens.segments([EOS], 0.0, 1.0) == []


def test_subtitles() -> None:
    segments = [Segment(0.0, 1.5, " a\n\nb --> c", []), Segment(3661.25, 3662.0, " d", [])]
    assert as_srt(segments) == ("1\n00:00:00,000 --> 00:00:01,500\na b -> c\n\n2\n01:01:01,250 --> 01:01:02,000\nd\n\n")
    assert as_vtt(segments).splitlines()[:4] == ["WEBVTT", "", "00:00:00.000 --> 00:00:01.500", "a b -> c"]
