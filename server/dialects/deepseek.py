"""DeepSeek V3, with arguments in a code block, and V3.1, without."""

import re
from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_arguments
from server.dialects.markers import markers_of
from server.dialects.reader import MAX_NAME, Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = re.compile(r"[^\s{`<]*")


class DeepSeek(ToolDialect):
    """Both versions are read whichever is chosen: they differ in what stands before the separator."""

    openings = (CALLS,)
    markers = (END_CALLS, CALL, SEPARATOR, END_CALL)

    def __init__(self, code_block: bool):
        before, after, end = (f"{CALL}function{SEPARATOR}", "\n```json\n", "\n```") if code_block else (CALL, SEPARATOR, "")
        self.frame = Frame(
            before, after, end + END_CALL, before_calls=CALLS, between_calls="\n" if code_block else "", after_calls=END_CALLS
        )

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        while True:
            yield from parser.space()
            if (yield from parser.next_is(END_CALLS)):
                break
            yield from parser.expect(CALL)
            name, _ = yield from parser.text_until(markers_of(SEPARATOR), MAX_NAME)
            if name.strip() == "function":
                name = (yield from parser.run_of(_NAME)) or name
            yield from parser.space()
            is_block = yield from parser.next_is("```json")
            yield from read_json_arguments(parser, name.strip())
            if is_block:
                yield from parser.space()
                yield from parser.next_is("```")
            yield from parser.space()
            yield from parser.next_is(END_CALL)
            parser.end_call()
        parser.end_call()
