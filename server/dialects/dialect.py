"""Describes a dialect: a table of markers, a generator that reads one call, and the format of a written call."""

import json
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

_LETTERS = string.ascii_letters + string.digits


WholeReading = Callable[["StreamParser", str, bool, bool], Reading[None]]
"""Reads an answer: of a parser, the rendered prompt, whether calls are looked for, and whether reasoning is."""

INDEX = "\0"
"""Placeholder for a call's number in a frame."""


@dataclass(frozen=True)
class Frame:
    """The text around a call's name and arguments in the model's own format; special tokens are written as their text."""

    before_name: str
    after_name: str
    after_arguments: str
    before_calls: str = ""
    between_calls: str = ""
    after_calls: str = ""
    several: bool = True
    """Whether one answer may contain several calls."""
    reasoning: tuple[str, str] | None = None
    """The text around the reasoning, if the constraint covers it."""


class ToolDialect:
    """A model's tool call format."""

    openings: tuple[str, ...] = ()
    """Markers that begin a call or a run of calls."""
    markers: tuple[str, ...] = ()
    """Other markers of the format. The parser needs all of them, even if the tokenizer treats them as special."""
    bare_openings: str = ""
    """First letters of an answer that may be a call without a marker."""
    ends_reasoning = False
    """Whether an opening inside the reasoning ends it."""
    frame: Frame | None = None
    """Format of forced calls; None: plain JSON (`server.dialects.json_calls`)."""
    whole: WholeReading | None = None
    """Reads the whole answer, in place of `read`."""

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        """Read what follows an opening marker: an unread letter if the call has no marker. Raises Broken, or Ended."""
        raise NotImplementedError

    def call_id(self, name: str, index: int) -> str:
        """Make an id for a call to which the model gives none."""
        return f"call_{random_letters(24)}"

    def frame_for(self, special_tokens: frozenset[str]) -> Frame | None:
        """The frame for a model with these special tokens."""
        return self.frame

    def of(self, tokens: Collection[str], response_template: Mapping[str, Any] | None = None) -> "ToolDialect":
        """The dialect of a model with these added tokens and this response template. Raises ValueError."""
        return self

    def needs_special_tokens(self, tokenizer: Any) -> bool:
        """Whether detokenizing must keep special tokens, because some are in markers."""
        return _are_in(special_tokens_of(tokenizer), (*self.openings, *self.markers))


@dataclass(frozen=True)
class ReasoningDialect:
    """A model's reasoning format."""

    start: tuple[str, ...] = ()
    """Markers that open the reasoning, at the beginning of the output or at the end of the prompt."""
    end: tuple[str, ...] = ()
    """Markers that close the reasoning; the n-th belongs to the n-th of `start`."""
    implied: bool = False
    """The output begins with reasoning even if nothing opened it."""
    expected: bool = False
    """The model reasons unless the prompt ends with a closed block, so a constraint on its answer waits for the end marker."""
    channels: bool = False
    """The output is a sequence of messages in channels (harmony)."""
    in_content: bool = False
    """The reasoning stays in the content, within its markers."""
    answer_start: tuple[str, ...] = ()
    """Markers that may open the answer. They are left out."""
    answer_end: tuple[str, ...] = ()
    """Markers that close an answer so opened. They are left out, unless content follows."""
    markers: tuple[str, ...] = ()
    """Further markers of the format."""
    whole: WholeReading | None = None
    """Reads the whole answer, with or without calls."""
    is_suffixed: bool = False
    """Whether the model's tokens may be markers `with_suffix`."""

    def of(self, tokens: Collection[str], response_template: Mapping[str, Any] | None = None) -> "ReasoningDialect":
        """The dialect of a model with these added tokens and this response template. Raises ValueError."""
        if not self.is_suffixed:
            return self
        start, end = (tuple(with_suffix(marker, tokens) for marker in markers) for markers in (self.start, self.end))
        return replace(self, start=start, end=end)

    def needs_special_tokens(self, tokenizer: Any) -> bool:
        """Whether detokenizing must keep special tokens, because some are in markers."""
        found = (*self.start, *self.end, *self.answer_start, *self.answer_end, *self.markers)
        return _are_in(special_tokens_of(tokenizer), found)

    def end_after(self, prompt_text: str) -> str:
        """The marker that closes the reasoning which a prompt opened; the first if it opened none."""
        return max(zip(self.start, self.end, strict=True), key=lambda pair: prompt_text.rfind(pair[0]))[1]

    def state_after(self, prompt_text: str, special_tokens: Iterable[str] = ()) -> bool | None:
        """Whether reasoning is open at the end of a rendered prompt: True, False (just closed), or None (not shown)."""
        tail = prompt_text.rstrip()
        if any(tail.endswith(end) for end in self.end):
            return False
        place, marker = max(((prompt_text.rfind(start), start) for start in self.start), default=(-1, ""))
        if place < 0 or any(prompt_text.find(end, place) >= 0 for end in self.end):
            return None
        after = prompt_text[place + len(marker) :]
        if not after.strip():
            return True
        # An assistant message to be continued is in the same turn, so no special token follows the marker.
        special = tuple(special_tokens)
        return True if special and not any(token in after for token in special) else None


def _are_in(tokens: Iterable[str], markers: Iterable[str]) -> bool:
    return any(token in marker for marker in markers for token in tokens)


def with_suffix(marker: str, tokens: Iterable[str]) -> str:
    """The token that is a marker with a suffix, as <think:open> is <think>; the marker itself if there is none."""
    beginning = f"{marker.removesuffix('>')}:"
    return next((token for token in tokens if token.startswith(beginning) and token.endswith(">")), marker)


def random_letters(length: int) -> str:
    """Random letters and digits, unique for each call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


def special_tokens_of(tokenizer: Any) -> frozenset[str]:
    """The texts of the tokens that `skip_special_tokens` leaves out."""
    if tokenizer is None:
        return frozenset()
    return frozenset(tokenizer.added_tokens[id] for id in tokenizer.all_special_ids if id in tokenizer.added_tokens)


def to_json(value: Any) -> str:
    """JSON text that can always be encoded as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_encodable(text) else json.dumps(value)


def is_encodable(text: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogate, which JSON can express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
