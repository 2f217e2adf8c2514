"""Calls written as Python: [get_weather(city="Paris", days=3), get_time()], bare, within markers, or a line each."""

import re
from typing import TYPE_CHECKING

from server.dialects.dialect import ToolDialect, to_json
from server.dialects.json_scanner import Broken
from server.dialects.python_literal import MAX_DEPTH, literal_to_json
from server.dialects.reader import MAX_NAME, Ended, Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

MAX_VALUE = 1 << 20
"""Maximum number of characters of one argument."""
MAX_ARGUMENTS = 1000
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")
_OUTSIDE = re.compile(r"""[^'"\[\](){},]*""")
_INSIDE = re.compile(r"""[^'"\[\](){}]*""")
_STRING = {quote: re.compile(rf"(?s)(?:[^{quote}\\]++|\\.)*+") for quote in "'\""}


class Pythonic(ToolDialect):
    """A list of calls within markers; `bare`: or without them."""

    def __init__(self, openings: tuple[str, ...] = (), closing: str = "", bare: bool = True):
        self.openings = openings
        self.markers = (closing,) if closing else ()
        self.bare_openings = "[" if bare else ""
        self._closing = closing

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from self._read_calls(parser)
        parser.end_call()
        if self._closing:
            yield from parser.space()
            yield from parser.next_is(self._closing)
        parser.end_call()

    def _read_calls(self, parser: "StreamParser") -> Reading[None]:
        yield from parser.space()
        yield from parser.expect("[")
        while True:
            yield from self._read_call(parser)
            yield from parser.space()
            if (yield from parser.next_is("]")):
                break
            yield from parser.expect(",")
            yield from parser.space()
            if (yield from parser.next_is("]")):
                break

    def _read_call(self, parser: "StreamParser") -> Reading[None]:
        yield from parser.space()
        name = yield from parser.run_of(_NAME)
        yield from parser.expect("(")
        parser.check_name(name)
        num_arguments = 0
        yield from parser.space()
        while not (yield from parser.next_is(")")):
            if num_arguments == MAX_ARGUMENTS:
                raise Broken
            key = yield from parser.run_of(_KEY)
            if not key or len(key) > MAX_NAME:
                raise Broken if (yield from parser.peek()) else Ended
            yield from parser.space()
            yield from parser.expect("=")
            value = yield from _read_value(parser)
            argument = f"{to_json(key)}: {literal_to_json(value)}"
            if not num_arguments:
                parser.start_call(name)
            parser.add_arguments((", " if num_arguments else "{") + argument)
            num_arguments += 1
            if (yield from parser.next_is(",")):
                yield from parser.space()
        if not num_arguments:
            parser.start_call(name)
        parser.add_arguments("}" if num_arguments else "{}")
        parser.end_call()


class PythonicLines(Pythonic):
    """Calls without a list around them, one per line: OLMo 3."""

    def _read_calls(self, parser: "StreamParser") -> Reading[None]:
        while True:
            yield from self._read_call(parser)
            yield from parser.space()
            letter = yield from parser.peek()
            if not letter or letter == self._closing[0]:
                break


def _read_value(parser: "StreamParser") -> Reading[str]:
    """The text of one argument, up to the comma or bracket that ends it."""
    pieces: list[str] = []
    depth = length = 0
    while True:
        pieces.append((yield from parser.run_of(_INSIDE if depth else _OUTSIDE)))
        mark = yield from parser.peek()
        if not mark:
            raise Ended
        if not depth and mark in ",)":
            return "".join(pieces)
        yield from parser.next_is(mark)
        pieces.append(mark)
        if mark in _STRING:
            pieces.append((yield from _read_string(parser, mark)))
        else:
            depth += 1 if mark in "[({" else -1
        length += len(pieces[-1]) + len(pieces[-2])
        if not 0 <= depth <= MAX_DEPTH or length > MAX_VALUE:
            raise Broken


def _read_string(parser: "StreamParser", quote: str) -> Reading[str]:
    """The rest of a string, its closing quote included."""
    pieces: list[str] = []
    while True:
        pieces.append((yield from parser.run_of(_STRING[quote])))
        mark = yield from parser.peek()
        if not mark:
            raise Ended
        yield from parser.next_is(mark)
        pieces.append(mark)
        if mark == quote:
            return "".join(pieces)
        escaped = yield from parser.peek()  # the backslash came without the escaped character
        yield from parser.next_is(escaped)
        pieces.append(escaped)
