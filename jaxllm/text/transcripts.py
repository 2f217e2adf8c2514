"""Whisper's language: prompts that ask for a transcript, and transcripts with their times from the tokens of the answer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxllm.errors import InvalidRequestError
from jaxllm.text.tokenizer import Tokenizer

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
SECONDS_PER_TIMESTAMP = 0.02
DEFAULT_LANGUAGE = "en"
TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class Segment:
    """A part of a transcript. Times are in seconds from the beginning of the audio."""

    start: float
    end: float
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class TranscriptTokens:
    """The special tokens of a model's tokenizer."""

    tokenizer: Tokenizer
    start: int
    tasks: Mapping[str, int]
    previous: int
    no_timestamps: int
    no_speech: int | None
    """The token for audio without speech; None: the tokenizer has none."""
    languages: Mapping[str, int]
    """By code; empty: the model knows English alone, and is asked for no language."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, is_multilingual: bool) -> "TranscriptTokens":
        """Raises InvalidRequestError if the tokenizer lacks some."""
        ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        names = ("startoftranscript", "startofprev", "notimestamps", *(TASKS if is_multilingual else ()))
        if missing := [name for name in names if f"<|{name}|>" not in ids]:
            raise InvalidRequestError(
                f"the model's tokenizer has no token <|{missing[0]}|>: it cannot be asked for transcripts"
            )
        languages = {found[1]: ids[text] for text in ids if (found := _LANGUAGE.fullmatch(text))} if is_multilingual else {}
        tasks = {name: ids[f"<|{name}|>"] for name in TASKS} if is_multilingual else {}
        no_speech = ids.get("<|nospeech|>", ids.get("<|nocaptions|>"))  # the latter before large-v3
        start, previous, no_timestamps = ids["<|startoftranscript|>"], ids["<|startofprev|>"], ids["<|notimestamps|>"]
        return cls(tokenizer, start, tasks, previous, no_timestamps, no_speech, languages)

    @property
    def first_timestamp(self) -> int:
        """The token of time 0; those behind it count in steps of 0.02 seconds."""
        return self.no_timestamps + 1

    def check(self, language: str | None, task: str) -> None:
        """Raise InvalidRequestError for what the model does not know."""
        if not self.languages:
            if task != "transcribe":
                raise InvalidRequestError(
                    "this model knows English alone and translates nothing; ask for a transcription", "model"
                )
            if language not in (None, DEFAULT_LANGUAGE):
                raise InvalidRequestError(
                    f"language is {language[:40]!r}, this model knows {DEFAULT_LANGUAGE} alone",
                    "language",  # type: ignore[index]
                )
        elif language is not None and language not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise InvalidRequestError(f"language is {language[:40]!r}, must be one of {known}", "language")

    def prompt(
        self, *, language: str | None, task: str, with_timestamps: bool, previous: str = "", max_previous: int = 0
    ) -> list[int]:
        """The token ids before a transcript. previous: text that comes before it, of which the last `max_previous` tokens are kept."""
        before: list[int] = []
        if previous.strip() and max_previous > 0:
            ids = self.tokenizer.encode(f" {previous.strip()}", add_special_tokens=False)
            before = [self.previous, *ids[-max_previous:]]
        spoken = [self.languages[language or DEFAULT_LANGUAGE], self.tasks[task]] if self.languages else []
        # The first time is given: a model that was not made to say one may leave all out.
        return [*before, self.start, *spoken, self.first_timestamp if with_timestamps else self.no_timestamps]

    def until_start(self, prompt: Sequence[int]) -> list[int]:
        """The part of a prompt up to the token behind which a model says whether anybody speaks."""
        return [*prompt[: prompt.index(self.start) + 1]]

    def language_of(self, token_id: int) -> str:
        """The code of a language by its token."""
        return next(code for code, known in self.languages.items() if known == token_id)

    def segments(self, token_ids: Sequence[int], start: float, seconds: float) -> list[Segment]:
        """The segments of an answer with timestamps to a clip of so many seconds that starts at `start`."""
        found: list[Segment] = []
        special = self.tokenizer.all_special_ids
        begin, own = 0.0, []
        for token_id in token_ids:
            if token_id < self.first_timestamp:
                if token_id not in special:
                    own.append(token_id)
                continue
            time = min(seconds, (token_id - self.first_timestamp) * SECONDS_PER_TIMESTAMP)
            if own:
                found.append(self._segment(start, begin, max(begin, time), own))
            begin, own = time, []
        if own:
            found.append(self._segment(start, begin, max(begin, seconds), own))
        return found

    def _segment(self, start: float, begin: float, end: float, token_ids: list[int]) -> Segment:
        return Segment(round(start + begin, 2), round(start + end, 2), self.tokenizer.decode(token_ids), token_ids)


def as_srt(segments: Iterable[Segment]) -> str:
    """A SubRip file."""
    parts = (
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )
    return "".join(parts)


def as_vtt(segments: Iterable[Segment]) -> str:
    """A WebVTT file."""
    parts = (f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(parts)


def _line(segment: Segment) -> str:
    """Text without what ends a cue or times one."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"
