"""Converts output tokens to text as they arrive. Holds back incomplete characters and beginnings of stop strings."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer

BROKEN = "\ufffd"
CONTEXT_TOKENS = 6
"""Tokens of the prompt that the first output token is decoded after."""
MAX_HELD_TOKENS = 8
"""Maximum number of tokens per character; text that is still incomplete after that many is invalid."""


_MAX_CHARACTER_BYTES = 4


class TextStream(Protocol):
    """Text of tokens, one by one."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The text held back, at the end of the output. An incomplete character has none."""
        ...


def text_stream(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
) -> TextStream:
    """A stream that continues the prompt's text: all it gives together is decode(prompt + output) without decode(prompt).

    Without a character that the output's end cuts, too.
    """
    skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return ByteTextStream(tokenizer, prompt_ids, skipped)
    glued = frozenset() if skip_special_tokens or spaces_between_special_tokens else frozenset(tokenizer.added_tokens)
    make = FallbackTextStream if tokenizer.fallback_bytes else WindowTextStream
    return make(tokenizer, prompt_ids, skipped, glued)


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of tokens, without a character that their end cuts."""
    stream = text_stream(tokenizer, [], skip_special_tokens=skip_special_tokens)
    return "".join(map(stream.push, token_ids)) + stream.flush()


class ByteTextStream(TextStream):
    """For byte-level tokenizers, whose text is the concatenation of the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]):
        self._bytes_of = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in _visible_tail(prompt_ids, skipped, _MAX_CHARACTER_BYTES):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        self._decoder.reset()
        return ""


class WindowTextStream(TextStream):
    """For any tokenizer: decodes the new tokens together with the last ones that gave text, and returns the added text.

    `glued` are tokens that no space may separate where two of them meet.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int], glued: frozenset[int] = frozenset()
    ):
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._glued = glued
        self._held: list[int] = []
        for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + 4):
            self._context = _visible_tail(prompt_ids, skipped, length)
            self._context_text = self._decode(self._context)
            if not self._context_text.startswith(BROKEN):  # it begins with a whole character
                break

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if token_id in self._glued and not self._held and self._context and self._context[-1] in self._glued:
            return self._advance(self._tokenizer.added_tokens[token_id], [token_id])
        self._held.append(token_id)
        whole = self._decode(self._context + self._held)
        if whole.endswith(BROKEN) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        text = self._added_text(whole)
        return self._advance(text, self._held) if text else ""

    def _added_text(self, whole: str) -> str:
        # A context that ends in the middle of a character reads differently once the character is complete.
        for before in (self._context_text, self._context_text.rstrip(BROKEN)):
            if whole.startswith(before):
                return whole[len(before) :]
        # The decoder rewrote text that is out already (it cleans up spaces, or calls a run of bytes broken after the fact).
        return self._decode(self._held)

    def _advance(self, text: str, new_context: list[int]) -> str:
        self._context, self._held = new_context, []
        self._context_text = self._decode(self._context)
        return text

    def _held_text(self) -> str:
        return self._added_text(self._decode(self._context + self._held)) if self._held else ""

    def flush(self) -> str:
        return self._advance(self._held_text().rstrip(BROKEN), self._context + self._held)

    def continue_after(self, token_ids: list[int]) -> str:
        """Continue as if these tokens were the last ones. Returns the text held back."""
        return self._advance(self._held_text(), token_ids)


class FallbackTextStream(TextStream):
    """For tokenizers with a token for each byte of characters that the vocabulary lacks: decodes bytes as they come, the rest by a window.

    Decoders turn a whole run of byte tokens into U+FFFD if one character of it is incomplete, so no window may begin in a run.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int], glued: frozenset[int] = frozenset()
    ):
        self._bytes_of = tokenizer.fallback_bytes
        self._anchor, _ = tokenizer.anchor
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._others = WindowTextStream(tokenizer, prompt_ids, skipped, glued)
        self._in_bytes = False
        for token_id in _visible_tail(prompt_ids, skipped, _MAX_CHARACTER_BYTES):
            if token_id in self._bytes_of:
                self.push(token_id)
            else:
                self._end_bytes()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if (byte := self._bytes_of.get(token_id)) is None:
            return self._end_bytes() + self._others.push(token_id)
        text = ""
        if not self._in_bytes:
            self._in_bytes = True
            # To tokens after the bytes it only matters that some text precedes them.
            text = self._others.continue_after(self._anchor)
        return text + self._decoder.decode(byte)

    def _end_bytes(self) -> str:
        self._in_bytes = False
        return self._decoder.decode(b"", final=True)

    def flush(self) -> str:
        self._decoder.reset()
        return self._others.flush()


def _visible_tail(token_ids: Sequence[int], skipped: frozenset[int], length: int) -> list[int]:
    """The last `length` ids that have text."""
    tail: list[int] = []
    for token_id in reversed(token_ids):
        if len(tail) == length:
            break
        if token_id not in skipped:
            tail.append(token_id)
    return tail[::-1]


class Detokenizer:
    """The text of one request's output, with its stop strings.

    `text` is the visible text so far. A possible beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: SamplingParams):
        self.text = ""
        self._stream = None
        if tokenizer is not None and params.detokenize:
            self._stream = text_stream(
                tokenizer,
                prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._full_text = ""

    def push(self, token_id: int) -> str | None:
        """Add a token. Returns the stop string that it completes, after which nothing may be pushed."""
        self._num_tokens += 1
        if self._stream is None:
            return None
        return self._append(self._stream.push(token_id))

    def push_stop_token(self, token_id: int) -> str | None:
        """Add the stop token that ended the request: it has no text unless stop strings are to be included."""
        return self.push(token_id) if self._keep_stop else None

    def finish(self) -> str | None:
        """End of the tokens: make held-back text visible. Returns a stop string that this completes."""
        stop = self._append(self._stream.flush()) if self._stream is not None else None
        if stop is None:
            self.text = self._full_text
        return stop

    def _append(self, new_text: str) -> str | None:
        if not new_text:
            return None
        searched = len(self._full_text)
        self._full_text += new_text
        if self._stops and self._num_tokens > self._min_tokens and (found := self._find_stop(searched)):
            stop, end = found
            self.text = self._full_text = self._full_text[: end if self._keep_stop else end - len(stop)]
            return stop
        self.text = self._full_text[: len(self._full_text) - self._num_held_back()]
        return None

    def _find_stop(self, searched: int) -> tuple[str, int] | None:
        """The stop string that ends first beyond `searched` characters, and where it ends; among equals the first listed."""
        best = None
        for stop in self._stops:
            at = self._full_text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[1]):
                best = (stop, at + len(stop))
        return best

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self._keep_stop:
            return 0
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._full_text)), longest, -1):
                if self._full_text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
