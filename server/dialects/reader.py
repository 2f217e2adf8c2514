"""Reads text that arrives in pieces: reading functions are generators that wait for more text.

Every step has a bounded lookahead and scans each character a bounded number of times, so any text takes linear time.
Results do not depend on where the text is split.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from server.dialects.json_scanner import Broken, JsonScanner
from server.dialects.markers import Markers

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that waits for more text at each yield."""

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")
MAX_NAME = 512
"""Maximum number of characters of a name, key or header. A longer one is not a call."""


class Ended(Exception):
    """The text ended where more was needed."""


class Reader:
    """The unread text, and the text read since the last mark."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._over = False
        self._read: list[str] | None = None

    @property
    def num_read(self) -> int:
        """Pieces read since the mark."""
        return len(self._read or ())

    def _add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._read is not None:
            self._read.append(piece)
        return piece

    def take_all(self) -> str:
        """Read what has arrived."""
        return self._take(len(self._text))

    def mark(self, already_read: str = "") -> None:
        """Set the mark: start to record the text read."""
        self._read = [already_read] if already_read else []

    def release(self, after: int) -> str:
        """Remove the mark; return the text read since, without its first `after` pieces."""
        read, self._read = "".join((self._read or ())[after:]), None
        return read

    def copy_until(self, markers: Markers, sink: Callable[[str], Any]) -> Reading[str | None]:
        """Pass text on up to the first marker. Returns the marker, or None at the end of the text."""
        while True:
            found = markers.search(self._text, self._at)
            if found:
                if found[0] > self._at:
                    sink(self._take(found[0]))
                return self._take(found[1])
            hold = len(self._text) if self._over else markers.held_from(self._text, self._at)
            if hold > self._at:
                sink(self._take(hold))
            if self._over:
                return None
            yield

    def text_until(self, markers: Markers, limit: int | None = None) -> Reading[tuple[str, str]]:
        """The text before the first marker, and that marker. Raises Broken past `limit` characters, Ended at the end."""
        pieces: list[str] = []
        left = [limit]

        def keep(piece: str) -> None:
            if left[0] is not None:
                left[0] -= len(piece)
                if left[0] < 0:
                    raise Broken
            pieces.append(piece)

        marker = yield from self.copy_until(markers, keep)
        if marker is None:
            raise Ended
        return "".join(pieces), marker

    def run_of(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest run of characters of a class; the pattern is that class with `*`."""
        pieces: list[str] = []
        while True:
            found = pattern.match(self._text, self._at)
            if found and found.end() > self._at:
                pieces.append(self._take(found.end()))
            if self._at < len(self._text) or self._over:
                return "".join(pieces)
            yield

    def space(self) -> Reading[str]:
        """Skip white space."""
        return self.run_of(_SPACES)

    def peek(self) -> Reading[str]:
        """Peek at the next character; empty at the end of the text."""
        while self._at == len(self._text) and not self._over:
            yield
        return self._text[self._at : self._at + 1]

    def next_is(self, text: str) -> Reading[bool]:
        """Read exactly this text if it comes next. Returns whether it did."""
        while True:
            ahead = self._text[self._at : self._at + len(text)]
            if ahead == text:
                self._take(self._at + len(text))
                return True
            if self._over or not text.startswith(ahead):
                return False
            yield

    def first_of(self, texts: Iterable[str]) -> Reading[str]:
        """Read whichever of these texts comes next. Returns it, or an empty text."""
        for text in texts:
            if text and (yield from self.next_is(text)):
                return text
        return ""

    def expect(self, text: str) -> Reading[None]:
        """Read exactly this. Raises Broken, or Ended if the text ends within it."""
        if not (yield from self.next_is(text)):
            if self._over and text.startswith(self._text[self._at :]):
                raise Ended
            raise Broken

    def json_value(self, sink: Callable[[str], Any] | None = None, limit: int | None = None) -> Reading[str]:
        """Read one JSON value as written; a sink receives it as it arrives. Raises Broken, or Ended."""
        scanner = JsonScanner()
        pieces: list[str] = []
        length = 0
        while True:
            if self._at < len(self._text):
                end = scanner.scan(self._text, self._at)
                if end > self._at:
                    length += end - self._at
                    if limit is not None and length > limit:
                        raise Broken
                    piece = self._take(end)
                    if sink:
                        sink(piece)
                    else:
                        pieces.append(piece)
            if self._over and not scanner.done:
                scanner.finish()
            if scanner.broken:
                raise Broken
            if scanner.done:
                return "".join(pieces)
            if self._over:
                raise Ended
            yield

    def json_string(self) -> Reading[str]:
        """The value of a JSON string of at most MAX_NAME characters."""
        if (yield from self.peek()) != '"':
            raise Broken if self._at < len(self._text) else Ended
        value: str = json.loads((yield from self.json_value(limit=MAX_NAME)))
        return value
