"""Calls in tags, one for each parameter: Qwen3-Coder, GLM 4.5, MiniMax M2, DeepSeek V3.2 and others. The tool's schema gives the types."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from server.dialects.dialect import ToolDialect, to_json, with_suffix
from server.dialects.json_scanner import Broken, JsonScanner
from server.dialects.markers import Markers
from server.dialects.reader import MAX_NAME, Ended, Reading
from server.dialects.tools import NAME

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser


@dataclass(frozen=True)
class Tags:
    """The markup of one format, in order of appearance."""

    section: str
    call: str
    """Before the name; empty if the name follows the section's tag."""
    after_name: str
    parameter: str
    after_key: str
    value: str
    """Between the key's end and the value, after white space; empty if the value follows at once."""
    after_value: str
    after_call: str
    after_section: str
    several: bool = False
    """Whether a section may hold several calls."""
    after_key_of_json: str = ""
    """In place of `after_key` if the value is JSON; values after `after_key` are then strings, whatever the schema."""
    verbatim: bool = False
    """Whether line breaks next to a value belong to it."""
    takes_cdata: bool = False
    """Whether a value may be a CDATA section, in which tags are text."""


QWEN3_CODER = Tags("<tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>")
MIMO = replace(QWEN3_CODER, verbatim=True)
SEED_OSS = replace(QWEN3_CODER, section="<seed:tool_call>", after_section="</seed:tool_call>")
GLM45 = Tags("<tool_call>", "", "\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "</tool_call>")
MINIMAX_M2 = Tags(
    "<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>", "</minimax:tool_call>",
    several=True,
)  # fmt: skip
K2_HORIZON = Tags(
    "<ifm|tool_calls>", "<ifm|tool_call>", "\n", "<ifm|arg_key>", "</ifm|arg_key>", "<ifm|arg_value>", "</ifm|arg_value>",
    "</ifm|tool_call>", "</ifm|tool_calls>", several=True,
)  # fmt: skip
DOTS = replace(MINIMAX_M2, section="<dots_function_call>", after_section="</dots_function_call>")
HY_V3 = Tags(
    "<tool_calls>", "<tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>",
    "</tool_calls>", several=True, verbatim=True,
)  # fmt: skip
MINICPM5 = Tags(
    '<function name="', "", '">', '<param name="', '">', "", "</param>", "", "</function>", verbatim=True, takes_cdata=True
)  # fmt: skip
_CDATA, _END_CDATA = "<![CDATA[", "]]>"


def dsml(section: str, space: str = "") -> Tags:
    """DeepSeek's tags from V3.2 on: their first word is the token ｜DSML｜."""
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return Tags(
        f"{begin}{section}>", f'{begin}invoke name="', '">', f'{begin}parameter name="', '" string="true">', "",
        f"{end}parameter>", f"{end}invoke>", f"{end}{section}>",
        several=True, after_key_of_json='" string="false">', verbatim=True,
    )  # fmt: skip


class XmlCalls(ToolDialect):
    def __init__(self, tags: Tags, section_optional: bool = False, ends_reasoning: bool = False, is_suffixed: bool = False):
        self.tags = tags
        self.ends_reasoning = ends_reasoning
        self.is_suffixed = is_suffixed
        self.openings = (tags.section, tags.call) if section_optional else (tags.section,)
        self.markers = tuple(tag for tag in vars(tags).values() if isinstance(tag, str) and len(tag) > 1)
        ends = (tags.after_call, tags.after_section)
        self._after_name = Markers((tags.after_name, tags.parameter, *ends))
        self._after_key = Markers((tags.after_key, tags.after_key_of_json))
        self._after_value = Markers((tags.after_value, tags.parameter, *ends))
        self._after_cdata = Markers((_CDATA, _END_CDATA, tags.after_value, tags.parameter, *ends))

    def of(self, tokens: Collection[str], response_template: Mapping[str, Any] | None = None) -> ToolDialect:
        if not self.is_suffixed:
            return self
        tags: dict[str, Any] = {
            name: with_suffix(tag, tokens) for name, tag in vars(self.tags).items() if isinstance(tag, str) and tag
        }
        return XmlCalls(replace(self.tags, **tags), ends_reasoning=self.ends_reasoning)

    def read(self, parser: "StreamParser", opening: str) -> Reading[None]:
        tags = self.tags
        yield from parser.space()
        if tags.call and opening == tags.section:
            yield from parser.expect(tags.call)
        while True:
            is_over = yield from self._read_call(parser)
            parser.end_call()
            yield from parser.space()
            if is_over or (yield from parser.next_is(tags.after_section)):
                break
            if not (tags.several and opening == tags.section and (yield from parser.next_is(tags.call))):
                break
        parser.end_call()

    def _read_call(self, parser: "StreamParser") -> Reading[bool]:
        """Read from the name to the call's end. Returns whether the section ended with it."""
        tags = self.tags
        name, marker = yield from parser.text_until(self._after_name, MAX_NAME)
        name = name.strip()
        if not NAME.fullmatch(name) and name not in parser.tools:
            raise Broken
        parser.start_call(name)
        tool = parser.tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        before = "{"
        while marker not in (tags.after_call, tags.after_section):
            if marker != tags.parameter:
                yield from parser.space()
                marker = yield from self._next_tag(parser)
                continue
            key, after_key = yield from parser.text_until(self._after_key, MAX_NAME)
            if tags.value:
                yield from parser.space()
                yield from parser.expect(tags.value)
            value, marker = yield from self._read_value(parser)
            schema = properties.get(key.strip()) if isinstance(properties, Mapping) else None
            if tags.after_key_of_json:
                schema = {} if after_key == tags.after_key_of_json else {"type": "string"}
            parser.add_arguments(f"{before}{to_json(key.strip())}: {typed_json(value, schema, tags.verbatim)}")
            before = ", "
        parser.add_arguments("{}" if before == "{" else "}")
        return marker == tags.after_section

    def _read_value(self, parser: "StreamParser") -> Reading[tuple[str, str]]:
        """A value, and the tag behind it. A section ends where it does in XML, unless another end follows before the tag: chat templates do
        not escape what is in sections."""
        if not self.tags.takes_cdata or not (yield from parser.next_is(_CDATA)):
            return (yield from parser.text_until(self._after_value))
        value, marker = "", _CDATA
        while marker in (_CDATA, _END_CDATA):
            if marker == _CDATA:
                value += (yield from parser.text_until(Markers((_END_CDATA,))))[0]
            text, marker = yield from parser.text_until(self._after_cdata)
            if marker == _END_CDATA:
                value += _END_CDATA + text
            elif text.strip():
                value += text
        return value, marker

    def _next_tag(self, parser: "StreamParser") -> Reading[str]:
        tags = self.tags
        tag = yield from parser.first_of((tags.parameter, tags.after_call, tags.after_section))
        if not tag:
            raise Broken if (yield from parser.peek()) else Ended
        return tag


def typed_json(value: str, schema: Any, verbatim: bool = False) -> str:
    """The JSON text of a tag's value: a string if the schema allows no other type or the value is not JSON."""
    text = value if verbatim else value.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if types == {"string"}:
        return to_json(text)
    bare = text.strip()
    if "boolean" in types and bare in ("True", "False"):
        return bare.lower()
    if types & {"null"} and bare in ("None", "null"):
        return "null"
    if "string" in types and bare[:1] not in ("{", "["):
        return to_json(text)
    return bare if _is_json(bare) else to_json(text)


def _types(schema: Any) -> set[str]:
    """The types that a schema names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return set().union(*(_types(one) for one in schema[key]))
    return {_JSON_TYPES.get(type(one), "object") for one in schema["enum"]} if isinstance(schema.get("enum"), list) else set()


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def _is_json(text: str) -> bool:
    scanner = JsonScanner()
    end = scanner.scan(text, 0)
    if not scanner.done:
        scanner.finish()
    return scanner.done and not scanner.broken and end == len(text)
