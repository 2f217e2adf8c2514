"""Calls in JSON after a marker, usually followed by another marker: Hermes, Qwen, Granite, Jamba, Phi 4."""

from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_calls
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser


class MarkedJson(ToolDialect):
    """An opening, {"name": ..., "arguments": {...}} or an array of such, and a closing."""

    def __init__(self, frame: Frame, openings: tuple[str, ...], closing: str = ""):
        self.frame = frame
        self.openings = openings
        self.markers = (closing,) if closing else ()

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from read_json_calls(parser)
        yield from parser.space()
        yield from parser.first_of(self.markers)
        parser.end_call()


def _array(opening: str, closing: str) -> Frame:
    return Frame(
        '{"name": "', '", "arguments": ', "}", before_calls=f"{opening}[", between_calls=", ", after_calls=f"]{closing}"
    )


HERMES = MarkedJson(
    Frame('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between_calls="\n"),
    ("<tool_call>",),
    "</tool_call>",
)
GRANITE = MarkedJson(_array("<|tool_call|>", ""), ("<|tool_call|>", "<tool_call>"))
JAMBA = MarkedJson(_array("<tool_calls>", "</tool_calls>"), ("<tool_calls>",), "</tool_calls>")
PHI4_MINI = MarkedJson(_array("functools", ""), ("functools",))
