"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or in later models [TOOL_CALLS]name[ARGS]{...} for each call."""

import re
from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect, random_letters
from server.dialects.json_calls import read_json_arguments, read_json_calls
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

_NAME = re.compile(r"[^\[{]*")


class Mistral(ToolDialect):
    openings = ("[TOOL_CALLS]",)
    markers = ("[ARGS]", "[CALL_ID]")

    frame = Frame('{"name": "', '", "arguments": ', "}", before_calls="[TOOL_CALLS][", between_calls=", ", after_calls="]")

    def frame_for(self, special_tokens: frozenset[str]) -> Frame | None:
        return Frame("[TOOL_CALLS]", "[ARGS]", "") if "[ARGS]" in special_tokens else self.frame

    def call_id(self, name: str, index: int) -> str:
        return random_letters(9)  # templates of these models refuse any other length

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from parser.space()
        if (yield from parser.peek()) in ("[", "{"):
            yield from read_json_calls(parser)
            return
        name = yield from parser.run_of(_NAME)
        call_id = ""
        if (yield from parser.next_is("[CALL_ID]")):
            call_id = yield from parser.run_of(_NAME)
        yield from parser.next_is("[ARGS]")
        yield from read_json_arguments(parser, name.strip(), call_id.strip() or None)
        parser.end_call()
