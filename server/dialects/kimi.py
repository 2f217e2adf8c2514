"""Kimi K2: each call is named by its id, functions.NAME:INDEX."""

from typing import TYPE_CHECKING

from jaxllm.thinking import KIMI_CALLS
from server.dialects.dialect import INDEX, Frame, ToolDialect
from server.dialects.json_calls import read_json_arguments
from server.dialects.markers import markers_of
from server.dialects.reader import MAX_NAME, Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

CALLS, END_CALLS = KIMI_CALLS, "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class Kimi(ToolDialect):
    openings = (CALLS,)
    markers = (END_CALLS, CALL, ARGUMENTS, END_CALL)
    ends_reasoning = True
    frame = Frame(f"{CALL}functions.", f":{INDEX}{ARGUMENTS}", END_CALL, before_calls=CALLS, after_calls=END_CALLS)

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        while True:
            yield from parser.space()
            if (yield from parser.next_is(END_CALLS)):
                break
            yield from parser.expect(CALL)
            written, _ = yield from parser.text_until(markers_of(ARGUMENTS), MAX_NAME)
            call_id = written.strip()
            name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
            yield from read_json_arguments(parser, name, call_id)
            yield from parser.space()
            yield from parser.next_is(END_CALL)
            parser.end_call()
        parser.end_call()
