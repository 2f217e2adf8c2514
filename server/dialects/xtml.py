"""Kimi K3: calls in tags between three tokens, whose attributes have the tool, and the name and type of each argument."""

import re
from typing import TYPE_CHECKING

from server.dialects.dialect import ToolDialect, to_json
from server.dialects.json_scanner import Broken
from server.dialects.markers import Markers, markers_of
from server.dialects.reader import MAX_NAME, Ended, Reading
from server.dialects.tools import NAME
from server.dialects.xml import typed_json

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TOOLS, END_TOOLS = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
CALL, END_CALL = f"{OPEN}call ", f"{CLOSE}call{SEP}"
ARGUMENT, END_ARGUMENT = f"{OPEN}argument ", f"{CLOSE}argument{SEP}"
JSON, END_JSON = f"{OPEN}json", f"{CLOSE}json{SEP}"
END_MESSAGE = f"{CLOSE}message{SEP}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_HEADER = Markers((SEP, OPEN, CLOSE))


class Xtml(ToolDialect):
    openings = (TOOLS,)
    markers = (END_TOOLS, CALL, END_CALL, ARGUMENT, END_ARGUMENT, JSON, END_JSON, END_MESSAGE, OPEN, CLOSE, SEP)
    ends_reasoning = True

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from parser.space()
        yield from parser.expect(CALL)
        while True:
            yield from self._read_call(parser)
            parser.end_call()
            yield from parser.space()
            if (yield from parser.next_is(END_TOOLS)) or not (yield from parser.next_is(CALL)):
                break
        yield from parser.space()
        yield from parser.next_is(END_MESSAGE)
        parser.end_call()

    def _read_call(self, parser: "StreamParser") -> Reading[None]:
        name = (yield from _attributes(parser)).get("tool", "")
        if not NAME.fullmatch(name) and name not in parser.tools:
            raise Broken
        parser.start_call(name)
        before = "{"
        while True:
            yield from parser.space()
            tag = yield from parser.first_of((ARGUMENT, JSON, END_CALL))
            if not tag:
                raise Broken if (yield from parser.peek()) else Ended
            if tag == END_CALL:
                break
            given = yield from _attributes(parser)
            if tag == JSON:
                yield from parser.space()
                if before != "{" or (yield from parser.peek()) != "{":
                    raise Broken
                parser.add_arguments((yield from parser.json_value()))
                yield from parser.space()
                yield from parser.expect(END_JSON)
                before = ""
                continue
            value, _ = yield from parser.text_until(markers_of(END_ARGUMENT))
            schema = {"type": "string"} if given.get("type", "string") == "string" else {}
            parser.add_arguments(f"{before}{to_json(given.get('key', ''))}: {typed_json(value, schema, verbatim=True)}")
            before = ", "
        parser.add_arguments({"{": "{}", "": ""}.get(before, "}"))


def _attributes(parser: "StreamParser") -> Reading[dict[str, str]]:
    """Attributes of a tag, read to its end."""
    header, end = yield from parser.text_until(_HEADER, 2 * MAX_NAME)
    if end != SEP:
        raise Broken
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(header)}
