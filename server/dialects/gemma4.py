"""Gemma 4 and FunctionGemma: call:name{key:value,…} between two tokens, with strings between two of a third, which nothing escapes."""

import contextlib
import re
from typing import TYPE_CHECKING

from server.dialects.dialect import ToolDialect, to_json
from server.dialects.json_scanner import MAX_DEPTH, Broken
from server.dialects.markers import markers_of
from server.dialects.python_literal import literal_to_json
from server.dialects.reader import MAX_NAME, Ended, Reading
from server.dialects.tool_schema import STRINGS, SchemaPlace
from server.dialects.tools import NAME
from server.dialects.xml import typed_json

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

MAX_WORD = 1024
"""Maximum number of characters of a value without quotes."""
_KEY = re.compile(r'[^\s:,{}\[\]"<]*')
_WORD = re.compile(r'[^,{}\[\]"<]*')
_WORDS = {"None": "null", "True": "true", "False": "false"}


class Gemma4(ToolDialect):
    """Reads JSON's quotes too, and words without quotes as strings unless they are JSON."""

    def __init__(
        self,
        call: str = "<|tool_call>",
        end_call: str = "<tool_call|>",
        quote: str = '<|"|>',
        *,
        reasons: bool = True,
        quotes_all: bool = False,
    ):
        """reasons: whether the models of the format do, so that calls may end reasoning. quotes_all: whether they may put quotes around
        arguments of every type, which the tool's schema then tells."""
        self.openings, self.markers = (call,), (end_call, quote)
        self.ends_reasoning = reasons
        self._end_call, self._quote, self._quotes_all = end_call, quote, quotes_all

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from parser.space()
        yield from parser.expect("call:")
        while True:
            yield from self._read_call(parser)
            yield from parser.space()
            if (yield from parser.next_is(self._end_call)) or not (yield from parser.next_is("call:")):
                break
        parser.end_call()

    def _read_call(self, parser: "StreamParser") -> Reading[None]:
        name, _ = yield from parser.text_until(markers_of("{"), MAX_NAME)
        name = name.strip()
        if not NAME.fullmatch(name) and name not in parser.tools:
            raise Broken
        parser.check_name(name)
        before = "{"
        place = _arguments(parser, name) if self._quotes_all else STRINGS
        yield from parser.space()
        while not (yield from parser.next_is("}")):
            member = yield from _read_member(parser, self._quote, 1, place)
            if before == "{":
                parser.start_call(name)
            parser.add_arguments(before + member)
            before = ", "
            yield from _skip_comma(parser, "}")
        if before == "{":
            parser.start_call(name)
        parser.add_arguments("{}" if before == "{" else "}")
        parser.end_call()


def _arguments(parser: "StreamParser", name: str) -> SchemaPlace:
    """The schema of a tool's arguments."""
    tool = parser.tools.get(name)
    return SchemaPlace.of(tool.parameters) if tool else STRINGS


def _read_member(parser: "StreamParser", quote: str, depth: int, place: SchemaPlace) -> Reading[str]:
    """The JSON text of a key and its value. place: of the object."""
    if (yield from parser.next_is(quote)):
        key, _ = yield from parser.text_until(markers_of(quote), MAX_NAME)
    elif (yield from parser.peek()) == '"':
        key = yield from parser.json_string()
    else:
        key = yield from parser.run_of(_KEY)
        if not key or len(key) > MAX_NAME:
            raise Broken if (yield from parser.peek()) else Ended
    yield from parser.space()
    yield from parser.expect(":")
    return f"{to_json(key)}: {(yield from _read_value(parser, quote, depth, place.member(key)))}"


def _read_value(parser: "StreamParser", quote: str, depth: int, place: SchemaPlace) -> Reading[str]:
    """The JSON text of the next value. place: which tells the type of one in quotes."""
    if depth > MAX_DEPTH:
        raise Broken
    yield from parser.space()
    if (yield from parser.next_is(quote)):
        text, _ = yield from parser.text_until(markers_of(quote))
        return _unquoted(text, place)
    letter = yield from parser.peek()
    if letter == '"':
        return (yield from parser.json_value())
    if letter and letter in "{[":
        return (yield from _read_items(parser, quote, letter, depth, place))
    word = (yield from parser.run_of(_WORD)).strip()
    if not word or len(word) > MAX_WORD:
        raise Broken if (yield from parser.peek()) else Ended
    return _WORDS.get(word) or typed_json(word, None)


def _unquoted(text: str, place: SchemaPlace) -> str:
    """The JSON text of what stands in quotes. Chat templates may write objects and arrays there as Python does."""
    found = typed_json(text, place.schema, verbatim=True)
    if found.startswith('"') and text[:1] in ("{", "[") and place.takes_items:
        with contextlib.suppress(Broken):
            return literal_to_json(text)
    return found


def _read_items(parser: "StreamParser", quote: str, opening: str, depth: int, place: SchemaPlace) -> Reading[str]:
    """The JSON text of an object or an array."""
    is_object = opening == "{"
    closing = "}" if is_object else "]"
    yield from parser.next_is(opening)
    items = []
    yield from parser.space()
    while not (yield from parser.next_is(closing)):
        if is_object:
            items.append((yield from _read_member(parser, quote, depth + 1, place)))
        else:
            items.append((yield from _read_value(parser, quote, depth + 1, place.item())))
        yield from _skip_comma(parser, closing)
    return f"{opening}{', '.join(items)}{closing}"


def _skip_comma(parser: "StreamParser", closing: str) -> Reading[None]:
    """Skip the comma behind an item, which may be missing before the closing bracket."""
    yield from parser.space()
    if (yield from parser.peek()) != closing:
        yield from parser.expect(",")
        yield from parser.space()
