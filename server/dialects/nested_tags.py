"""MiniMax M3: calls in tags that a token precedes, a tag of its name for each parameter and for all that is in its value."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from server.dialects.dialect import ToolDialect, to_json
from server.dialects.json_scanner import MAX_DEPTH, Broken
from server.dialects.markers import Markers, markers_of
from server.dialects.reader import MAX_NAME, Ended, Reading
from server.dialects.tools import NAME
from server.dialects.xml import typed_json

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

TOKEN = "]<]minimax[>["
SECTION, END_SECTION = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
CALL, END_CALL = f'{TOKEN}<invoke name="', f"{TOKEN}</invoke>"
ITEM = "item"
"""The tag of the elements of an array."""
_BEFORE_TAG = Markers((TOKEN,))


class NestedTags(ToolDialect):
    """A parameter's schema gives the types of the texts in it."""

    openings = (SECTION,)
    markers = (END_SECTION, CALL, END_CALL, TOKEN)

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from parser.space()
        yield from parser.expect(CALL)
        while True:
            yield from self._read_call(parser)
            parser.end_call()
            yield from parser.space()
            if (yield from parser.next_is(END_SECTION)) or not (yield from parser.next_is(CALL)):
                break
        parser.end_call()

    def _read_call(self, parser: "StreamParser") -> Reading[None]:
        name, _ = yield from parser.text_until(markers_of('">'), MAX_NAME)
        name = name.strip()
        if not NAME.fullmatch(name) and name not in parser.tools:
            raise Broken
        parser.start_call(name)
        tool, before = parser.tools.get(name), "{"
        schema = tool.parameters if tool else None
        while True:
            yield from parser.space()
            if (yield from parser.next_is(END_CALL)):
                break
            yield from _expect(parser, f"{TOKEN}<")
            key = yield from _read_key(parser)
            value = yield from _read_value(parser, key, _of_property(schema, key), 1)
            parser.add_arguments(f"{before}{to_json(key)}: {value}")
            before = ", "
        parser.add_arguments("{}" if before == "{" else "}")


def _expect(parser: "StreamParser", text: str) -> Reading[None]:
    if not (yield from parser.next_is(text)):
        raise Broken if (yield from parser.peek()) else Ended


def _read_key(parser: "StreamParser") -> Reading[str]:
    key, _ = yield from parser.text_until(markers_of(">"), MAX_NAME)
    if not key or key.startswith("/"):
        raise Broken
    return key


def _read_value(parser: "StreamParser", key: str, schema: Any, depth: int) -> Reading[str]:
    """The JSON text of what is in a tag, and read its end."""
    if depth > MAX_DEPTH:
        raise Broken
    text, _ = yield from parser.text_until(_BEFORE_TAG)
    found: dict[str, list[str]] = {}
    while not (yield from parser.next_is(f"</{key}>")):
        yield from _expect(parser, "<")
        inner = yield from _read_key(parser)
        of_inner = schema.get("items") if inner == ITEM and isinstance(schema, Mapping) else _of_property(schema, inner)
        found.setdefault(inner, []).append((yield from _read_value(parser, inner, of_inner, depth + 1)))
        yield from parser.space()
        yield from _expect(parser, TOKEN)
    if not found:
        return typed_json(text, schema)
    if found.keys() == {ITEM}:
        return f"[{', '.join(found[ITEM])}]"
    members = (f"{to_json(name)}: {_one_or_all(values)}" for name, values in found.items())
    return f"{{{', '.join(members)}}}"


def _one_or_all(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _of_property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None
