"""xLAM: a JSON array of calls, bare or after one of the openings that its models were trained with."""

from typing import TYPE_CHECKING

from server.dialects.dialect import ToolDialect
from server.dialects.json_calls import JSON_CALLS, read_json_calls
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

_CODE = "```json"


class Xlam(ToolDialect):
    openings = ("[TOOL_CALLS]", "<tool_call>", _CODE)
    markers = ("</tool_call>",)
    bare_openings = "[{"
    frame = JSON_CALLS.frame

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        parser.is_bare = parser.is_bare or opening == _CODE  # a block of code may also be an answer
        yield from read_json_calls(parser)
        yield from parser.space()
        yield from parser.first_of(("</tool_call>", "```"))
        parser.end_call()
