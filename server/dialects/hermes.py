"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_calls
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser


class Hermes(ToolDialect):
    openings = ("<tool_call>",)
    markers = ("</tool_call>",)
    frame = Frame('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between_calls="\n")

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from read_json_calls(parser)
        yield from parser.space()
        yield from parser.next_is("</tool_call>")
        parser.end_call()
