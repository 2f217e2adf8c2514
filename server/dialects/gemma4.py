"""Gemma 4 and FunctionGemma: call:name{key:value,…} between two tokens, with strings between two of a third, which nothing escapes."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from server.dialects.dialect import ToolDialect, to_json
from server.dialects.json_scanner import MAX_DEPTH, Broken
from server.dialects.markers import markers_of
from server.dialects.reader import MAX_NAME, Ended, Reading
from server.dialects.tools import NAME
from server.dialects.xml import typed_json

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

MAX_WORD = 1024
"""Maximum number of characters of a value without quotes."""
_KEY = re.compile(r'[^\s:,{}\[\]"<]*')
_WORD = re.compile(r'[^,{}\[\]"<]*')
_STRING = {"type": "string"}
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
        properties = _properties(parser, name) if self._quotes_all else {}
        yield from parser.space()
        while not (yield from parser.next_is("}")):
            member = yield from _read_member(parser, self._quote, 1, properties)
            if before == "{":
                parser.start_call(name)
            parser.add_arguments(before + member)
            before = ", "
            yield from _skip_comma(parser, "}")
        if before == "{":
            parser.start_call(name)
        parser.add_arguments("{}" if before == "{" else "}")
        parser.end_call()


def _properties(parser: "StreamParser", name: str) -> Mapping[str, Any]:
    """The schemas of a tool's arguments."""
    tool = parser.tools.get(name)
    found = tool.parameters.get("properties") if tool else None
    return found if isinstance(found, Mapping) else {}


def _read_member(parser: "StreamParser", quote: str, depth: int, properties: Mapping[str, Any] | None = None) -> Reading[str]:
    """The JSON text of a key and its value. properties: schemas by key, of values that may not be strings although quoted."""
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
    schema = (properties or {}).get(key, _STRING)
    return f"{to_json(key)}: {(yield from _read_value(parser, quote, depth, schema))}"


def _read_value(parser: "StreamParser", quote: str, depth: int, schema: Any = _STRING) -> Reading[str]:
    """The JSON text of the next value. schema: of one in quotes."""
    if depth > MAX_DEPTH:
        raise Broken
    yield from parser.space()
    if (yield from parser.next_is(quote)):
        text, _ = yield from parser.text_until(markers_of(quote))
        return typed_json(text, schema, verbatim=True)
    letter = yield from parser.peek()
    if letter == '"':
        return (yield from parser.json_value())
    if letter and letter in "{[":
        return (yield from _read_items(parser, quote, letter, depth))
    word = (yield from parser.run_of(_WORD)).strip()
    if not word or len(word) > MAX_WORD:
        raise Broken if (yield from parser.peek()) else Ended
    return _WORDS.get(word) or typed_json(word, None)


def _read_items(parser: "StreamParser", quote: str, opening: str, depth: int) -> Reading[str]:
    """The JSON text of an object or an array."""
    read_item, closing = (_read_member, "}") if opening == "{" else (_read_value, "]")
    yield from parser.next_is(opening)
    items = []
    yield from parser.space()
    while not (yield from parser.next_is(closing)):
        items.append((yield from read_item(parser, quote, depth + 1)))
        yield from _skip_comma(parser, closing)
    return f"{opening}{', '.join(items)}{closing}"


def _skip_comma(parser: "StreamParser", closing: str) -> Reading[None]:
    """Skip the comma behind an item, which may be missing before the closing bracket."""
    yield from parser.space()
    if (yield from parser.peek()) != closing:
        yield from parser.expect(",")
        yield from parser.space()
