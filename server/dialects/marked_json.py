"""Calls in JSON after a marker, usually followed by another marker: Hermes, Granite, Jamba, Phi 4, LongCat, Cohere and others."""

from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_calls
from server.dialects.reader import Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser


class MarkedJson(ToolDialect):
    """An opening, {"name": ..., "arguments": {...}} or an array of such, and a closing."""

    def __init__(self, frame: Frame, openings: tuple[str, ...], closing: str = "", name_key: str = "name"):
        self.frame = frame
        self._name_key = name_key
        self.openings = openings
        self.markers = (closing,) if closing else ()

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        yield from read_json_calls(parser, name_key=self._name_key)
        yield from parser.space()
        yield from parser.first_of(self.markers)
        parser.end_call()


def _array(opening: str, closing: str, name_key: str = "name", arguments_key: str = "arguments") -> Frame:
    return Frame(
        f'{{"{name_key}": "',
        f'", "{arguments_key}": ',
        "}",
        before_calls=f"{opening}[",
        between_calls=", ",
        after_calls=f"]{closing}",
    )


def _tagged(opening: str, closing: str) -> MarkedJson:
    """Each call within its own tags, on lines of their own."""
    frame = Frame(f'{opening}\n{{"name": "', '", "arguments": ', f"}}\n{closing}", between_calls="\n")
    return MarkedJson(frame, (opening,), closing)


HERMES = _tagged("<tool_call>", "</tool_call>")
LONGCAT = _tagged("<longcat_tool_call>", "</longcat_tool_call>")
GRANITE = MarkedJson(_array("<|tool_call|>", ""), ("<|tool_call|>", "<tool_call>"))
JAMBA = MarkedJson(_array("<tool_calls>", "</tool_calls>"), ("<tool_calls>",), "</tool_calls>")
PHI4_MINI = MarkedJson(_array("functools", ""), ("functools",))
GRANITE_20B_FC = MarkedJson(
    Frame('<function_call> {"name": "', '", "arguments": ', "}", between_calls="\n"), ("<function_call>",)
)
NEMOTRON = MarkedJson(_array("<TOOLCALL>", "</TOOLCALL>"), ("<TOOLCALL>",), "</TOOLCALL>")
COHERE = MarkedJson(
    _array("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    ("<|START_ACTION|>",),
    "<|END_ACTION|>",
    name_key="tool_name",
)
