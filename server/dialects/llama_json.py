"""Llama 3 and 4: {"name": ..., "parameters": {...}}, alone or after <|python_tag|>, several with a semicolon in between."""

from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_calls
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser


class LlamaJson(ToolDialect):
    openings = ("<|python_tag|>", "<|python_start|>")
    markers = ("<|python_end|>",)
    bare_openings = "{["
    frame = Frame('{"name": "', '", "parameters": ', "}", between_calls="; ")

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from read_json_calls(parser, separators=(";",))
        yield from parser.space()
        yield from parser.next_is("<|python_end|>")
        parser.end_call()
