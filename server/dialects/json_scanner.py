"""Finds the end of one JSON value in text that arrives in pieces, and reports a syntax error at once."""

import re
from enum import Enum, auto

MAX_DEPTH = 64
MAX_LITERAL = 1024
"""Maximum number of characters of one number."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SIMPLE = r'(?:-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99}+)?|true|false|null|"[^"\\\x00-\x1f]*+")'
_S = r"[ \t\n\r]*+"
_SIMPLE_ITEMS = re.compile(rf"(?:{_S}{_SIMPLE}{_S},)*+")
_SIMPLE_MEMBERS = re.compile(rf'(?:{_S}"[^"\\\x00-\x1f]*+"{_S}:{_S}{_SIMPLE}{_S},)*+')
"""Matches runs of simple members and items, each with its comma, in one step, because most values are such."""
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")


class Broken(Exception):
    """The text is not valid for the format that it began with."""


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()


class JsonScanner:
    """Reads one JSON value, piece by piece."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._expect = _Expect.VALUE
        self._open: list[str] = []
        self._in_key = False
        self._literal = ""
        self._hex_left = 0

    def scan(self, text: str, start: int) -> int:
        """Scan more text. Returns the index where the value ends or is broken, or the text's length while neither is found."""
        at, end = start, len(text)
        try:
            while at < end and not self.done:
                expect = self._expect
                if expect is _Expect.STRING:
                    at = _match_end(_PLAIN, text, at)
                    if at < end:
                        self._leave_plain(text[at])
                        at += 1
                elif expect is _Expect.LITERAL:
                    stop = min(_match_end(_WORD, text, at), at + MAX_LITERAL + 1 - len(self._literal))
                    self._literal += text[at:stop]
                    at = stop
                    if at < end or len(self._literal) > MAX_LITERAL:
                        self._end_literal()
                elif expect is _Expect.ESCAPE or expect is _Expect.HEX:
                    self._escape(text[at])
                    at += 1
                else:
                    at = _match_end(_SPACE, text, self._skip_simple(text, at))
                    if at < end:
                        at = self._token(text[at], at)
        except Broken:
            self.broken = True
        return at

    def _skip_simple(self, text: str, at: int) -> int:
        expect = self._expect
        if expect is _Expect.KEY or expect is _Expect.KEY_OR_END:
            stop, after = _match_end(_SIMPLE_MEMBERS, text, at), _Expect.KEY
        elif self._open and self._open[-1] == "[" and (expect is _Expect.VALUE or expect is _Expect.VALUE_OR_END):
            stop, after = _match_end(_SIMPLE_ITEMS, text, at), _Expect.VALUE
        else:
            return at
        if stop > at:
            self._expect = after
        return stop

    def finish(self) -> None:
        """End of the text: completes a top-level number or word."""
        try:
            self._end_literal()
        except Broken:
            self.broken = True

    def _end_literal(self) -> None:
        if self._expect is _Expect.LITERAL:
            if len(self._literal) > MAX_LITERAL or not _LITERAL.fullmatch(self._literal):
                raise Broken
            self._literal = ""
            self._value_over()

    def _leave_plain(self, letter: str) -> None:
        if letter == "\\":
            self._expect = _Expect.ESCAPE
        elif letter != '"':
            raise Broken
        elif self._in_key:
            self._in_key = False
            self._expect = _Expect.COLON
        else:
            self._value_over()

    def _escape(self, letter: str) -> None:
        if self._expect is _Expect.HEX:
            if letter not in _HEX:
                raise Broken
            self._hex_left -= 1
            if not self._hex_left:
                self._expect = _Expect.STRING
        elif letter == "u":
            self._expect, self._hex_left = _Expect.HEX, 4
        elif letter in '"\\/bfnrt':
            self._expect = _Expect.STRING
        else:
            raise Broken

    def _token(self, letter: str, at: int) -> int:
        """Scan the first letter of a token outside strings and literals. Returns the index to continue at."""
        expect = self._expect
        if expect is _Expect.VALUE or expect is _Expect.VALUE_OR_END:
            if letter == "]" and expect is _Expect.VALUE_OR_END:
                self._close("[")
            elif letter == '"':
                self._expect = _Expect.STRING
            elif letter in "{[":
                if len(self._open) == MAX_DEPTH:
                    raise Broken
                self._open.append(letter)
                self._expect = _Expect.KEY_OR_END if letter == "{" else _Expect.VALUE_OR_END
            elif _WORD.match(letter).end():  # type: ignore[union-attr]
                self._expect = _Expect.LITERAL
                return at
            else:
                raise Broken
        elif letter == '"' and (expect is _Expect.KEY or expect is _Expect.KEY_OR_END):
            self._in_key = True
            self._expect = _Expect.STRING
        elif letter == "}" and (expect is _Expect.KEY_OR_END or expect is _Expect.COMMA_OR_END):
            self._close("{")
        elif letter == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and letter == ",":
            self._expect = _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and letter == "]":
            self._close("[")
        else:
            raise Broken
        return at + 1

    def _close(self, opened: str) -> None:
        if self._open.pop() != opened:
            raise Broken
        self._value_over()

    def _value_over(self) -> None:
        self._expect = _Expect.COMMA_OR_END
        self.done = not self._open


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
