"""Apertus: an array of objects that each have one member, a call's arguments by its name."""

from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_arguments
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

CALLS, END_CALLS = "<|tools_prefix|>", "<|tools_suffix|>"


class Apertus(ToolDialect):
    openings = (CALLS,)
    markers = (END_CALLS,)
    frame = Frame('{"', '": ', "}", before_calls=f"{CALLS}[", between_calls=", ", after_calls=f"]{END_CALLS}")

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        before = "["
        while True:
            for text in (before, "{"):
                yield from parser.space()
                yield from parser.expect(text)
            yield from parser.space()
            name = yield from parser.json_string()
            yield from parser.space()
            yield from parser.expect(":")
            yield from read_json_arguments(parser, name)
            yield from parser.space()
            yield from parser.expect("}")
            parser.end_call()
            yield from parser.space()
            if (yield from parser.next_is("]")):
                break
            before = ","
        yield from parser.space()
        yield from parser.next_is(END_CALLS)
        parser.end_call()
