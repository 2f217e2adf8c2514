"""Checks a request's tools before anything is computed for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from jaxllm.errors import GrammarError, InvalidRequestError
from jaxllm.structured.json_schema import check_keywords, walk
from jaxllm.structured_outputs import size_fault

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20
MAX_PATTERN_LENGTH = 4096

_NAMING_NONE = {"type", "properties", "required", "title", "description", "$schema", "$id", "$comment", "$defs", "definitions"}
"""Keywords of a schema that allow no members of an object by name or pattern if properties and required are empty."""

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Pattern of function names, as models write them if they do not take them from the request."""
_GIVEN_NAME = re.compile(r"[\w.:/-](?:[\w.:/ -]*[\w.:/-])?")
"""Pattern of the names in requests, which are written into JSON and tags as they are."""
_NOT_PYTHON = re.compile(r"\\[pP]\{[^{}]*\}|\\u\{[0-9A-Fa-f]+\}|\\c[A-Za-z]")
"""Syntax of ECMA patterns that Python does not have."""


AskedChoice = Literal["none", "auto", "required"] | Mapping[str, Any]
"""A request's tool_choice: a word, or the object that names a function."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments, an object."""
    description: str | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The parameters' schema, stating that it is an object's; the empty object's for a function without parameters."""
        takes_none = self.parameters.keys() <= _NAMING_NONE and not any(map(self.parameters.get, ("properties", "required")))
        closed = {"properties": {}, "additionalProperties": False} if takes_none else {}
        return {**self.parameters, "type": "object", **closed}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call tools, and which tool, if it must call a specific one."""

    kind: Literal["none", "auto", "required", "named"]
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether a grammar forces calls."""
        return self.kind in ("required", "named")


def check_tools(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: AskedChoice | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Check the request's `tools` and `tool_choice`, whose shape `server.protocol.chat` has checked.

    Of functions with the same name the first is returned; the template shows all.
    Raises InvalidRequestError.
    """
    checked = () if tools is None else _tools(tools)
    return checked, _choice(tool_choice, [tool.name for tool in checked])


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    if not tools:
        raise InvalidRequestError("tools is empty; name at least one function or leave tools out", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} functions; at most {MAX_TOOLS} are possible", "tools")
    if (size := sum(len(msgspec.json.encode(tool["function"])) for tool in tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools has {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are possible", "tools")
    checked = tuple(_tool(tool["function"], f"tools[{index}].function") for index, tool in enumerate(tools))
    first_of_each_name = {tool.name: tool for tool in reversed(checked)}
    return tuple(tool for tool in checked if first_of_each_name[tool.name] is tool)


def _tool(function: Mapping[str, Any], param: str) -> Tool:
    name, parameters = function["name"], function.get("parameters") or {}
    if not _GIVEN_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{param}.name may have letters, digits, '_', '-', '.', ':', '/' and spaces between them only", f"{param}.name"
        )
    check_parameters(parameters, f"{param}.parameters")
    return Tool(name, parameters, function.get("description"), bool(function.get("strict")))


def _choice(choice: AskedChoice | None, names: Sequence[str]) -> ToolChoice:
    if choice is None:
        return ToolChoice("auto" if names else "none")
    if choice == "none":
        return ToolChoice("none")
    if not names:
        raise InvalidRequestError("tool_choice needs tools; name at least one function in tools", "tool_choice")
    if isinstance(choice, str):
        return ToolChoice(choice)
    name = choice["function"]["name"]
    if name not in names:
        raise InvalidRequestError(f"tool_choice names the function {name[:64]!r}, which tools lacks", "tool_choice")
    return ToolChoice("named", name)


def check_parameters(schema: Mapping[str, Any], param: str) -> None:
    """Reject anything but a JSON Schema of an object, without compiling it. Raises InvalidRequestError."""
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f'{param}.type must be "object"', f"{param}.type")
    if (fault := size_fault(schema)) is not None:
        raise InvalidRequestError(f"{param} {fault}", param)
    try:
        check_keywords(schema)
        for pointer, node in walk(schema):
            _check_patterns(pointer, node)
    except GrammarError as error:
        raise InvalidRequestError(f"{param} {error}", param) from None


def _check_patterns(pointer: str, node: Any) -> None:
    if not isinstance(node, Mapping):
        return
    for pattern in (*node.get("patternProperties", ()), *([node["pattern"]] if "pattern" in node else ())):
        if not _is_pattern(pattern):
            raise GrammarError(
                f"at {pointer} has a pattern that is no regular expression of at most {MAX_PATTERN_LENGTH} characters"
            )


def _is_pattern(pattern: str) -> bool:
    """Whether it is a plausible regular expression. Only the syntax is checked: it is never run here."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        return False
    pattern = _NOT_PYTHON.sub("x", pattern).replace("(?<", "(?P<").replace("(?P<=", "(?<=").replace("(?P<!", "(?<!")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True
