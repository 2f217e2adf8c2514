"""Formats of tool calls and reasoning of one's own: `=> name {"key": "value"}` on a line, and thoughts in <hm>.

    jaxllm serve MODEL --tool-parser-plugin docs/example_dialect/arrow_calls.py --tool-call-parser arrows \\
        --reasoning-parser-plugin docs/example_dialect/arrow_calls.py --reasoning-parser hm
"""

from server.dialects import ReasoningDialect, ToolDialect
from server.dialects.dialect import Frame
from server.dialects.json_calls import read_json_arguments
from server.dialects.markers import Markers
from server.dialects.reader import MAX_NAME, Reading
from server.dialects.stream_parser import StreamParser

_SPACE = Markers((" ",))


class ArrowCalls(ToolDialect):
    openings = ("=> ",)
    frame = Frame("=> ", " ", "\n")  # around name and arguments where tool_choice forces a call

    def read(self, parser: StreamParser, opening: str) -> Reading[None]:
        name, _ = yield from parser.text_until(_SPACE, MAX_NAME)
        yield from read_json_arguments(parser, name)
        parser.end_call()


TOOL_DIALECTS = {"arrows": ArrowCalls()}
REASONING_DIALECTS = {"hm": ReasoningDialect(start=("<hm>",), end=("</hm>",))}
