"""Calls as JSON objects with a name and arguments, shared by most dialects; and plain JSON as a dialect."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect, is_encodable
from server.dialects.json_scanner import Broken
from server.dialects.reader import Ended, Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id", "index")
"""Other members allowed in a call without a marker; they are ignored."""


def read_json_calls(parser: "StreamParser", separators: Iterable[str] = (), name_key: str = "name") -> Reading[None]:
    """One call, an array of calls, or calls with separators between them; `name_key` is the member with a call's name."""
    yield from parser.space()
    if (yield from parser.next_is("[")):
        yield from read_json_call(parser, name_key)
        yield from parser.space()
        while not (yield from parser.next_is("]")):
            yield from parser.expect(",")
            yield from read_json_call(parser, name_key)
            yield from parser.space()
        parser.end_call()
        return
    yield from read_json_call(parser, name_key)
    for separator in separators:
        while (yield from _separated(parser, separator)):
            yield from read_json_call(parser, name_key)


def _separated(parser: "StreamParser", separator: str) -> Reading[bool]:
    yield from parser.space()
    return (yield from parser.next_is(separator))


def read_json_call(parser: "StreamParser", name_key: str = "name") -> Reading[None]:
    """Read one object with a name and arguments, in any order. Streams the arguments once the name is known."""
    yield from parser.space()
    yield from parser.expect("{")
    name: str | None = None
    arguments: str | None = None
    is_started = False
    yield from parser.space()
    while True:
        key = yield from parser.json_string()
        yield from parser.space()
        yield from parser.expect(":")
        yield from parser.space()
        if key == name_key and name is None:
            name = yield from parser.json_string()
        elif key in ARGUMENTS and arguments is None:
            arguments = ""
            if name is not None and (yield from parser.peek()) == "{":
                parser.start_call(name)
                is_started = True
                yield from parser.json_value(parser.add_arguments)
            else:
                arguments = yield from parser.json_value()
        elif parser.is_bare and key not in OTHERS:
            raise Broken  # an answer in JSON, not a call
        else:
            yield from parser.json_value()
        yield from parser.space()
        if (yield from parser.next_is("}")):
            break
        yield from parser.expect(",")
        yield from parser.space()
    if name is None:
        raise Broken
    if not is_started:
        whole = whole_arguments(arguments)
        parser.start_call(name)
        parser.add_arguments(whole)
    parser.end_call()


def read_json_arguments(parser: "StreamParser", name: str, id: str | None = None) -> Reading[None]:
    """Read a call of a known name whose arguments are the next JSON object."""
    yield from parser.space()
    if (yield from parser.peek()) != "{":
        raise Broken if (yield from parser.peek()) else Ended
    parser.start_call(name, id)
    yield from parser.json_value(parser.add_arguments)


def whole_arguments(text: str | None) -> str:
    """Emit arguments that were read before the name, written as a string of JSON, or left out. Raises Broken."""
    if not text or text == "null":
        return "{}"
    if text.startswith('"'):
        text = json.loads(text)
        try:
            if not isinstance(json.loads(text or "{}"), dict) or not is_encodable(text):
                raise Broken
        except (ValueError, RecursionError):
            raise Broken from None
        return text or "{}"
    if not text.startswith("{"):
        raise Broken
    return text


class JsonCalls(ToolDialect):
    """Plain JSON only: `tool_constraint` forces it on models without a JSON format of their own."""

    bare_openings = "[{"
    frame = Frame('{"name": "', '", "arguments": ', "}", before_calls="[", between_calls=", ", after_calls="]")

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from read_json_calls(parser)


JSON_CALLS = JsonCalls()
