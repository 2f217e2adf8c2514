"""Checks what a request says of tools, before anything is computed for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_NAME_LENGTH = 64
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 10_000
MAX_PATTERN_LENGTH = 4096

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""How functions may be named."""
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties")
_NOT_PYTHON = re.compile(r"\\[pP]\{[^{}]*\}|\\u\{[0-9A-Fa-f]+\}|\\c[A-Za-z]")
"""What ECMA's patterns have and Python's lack."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments, an object; empty: any object."""
    description: str | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema, which says that it is an object's."""
        return {**self.parameters, "type": "object"}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call tools; which one, if it must call this one."""

    kind: Literal["none", "auto", "required", "named"]
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether calls are enforced by a grammar."""
        return self.kind in ("required", "named")


def check_tools(tools: Any, tool_choice: Any) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The request's fields `tools` and `tool_choice` (plain JSON values or None), checked. Raises InvalidRequestError."""
    checked = () if tools is None else _tools(tools)
    return checked, _choice(tool_choice, [tool.name for tool in checked])


def _tools(tools: Any) -> tuple[Tool, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError("tools must be an array of functions", "tools")
    if not tools:
        raise InvalidRequestError("tools is empty; name at least one function or leave tools out", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} functions; at most {MAX_TOOLS} are possible", "tools")
    checked = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, tool in enumerate(checked):
        if tool.name in names:
            raise InvalidRequestError(f"tools has two functions named {tool.name!r}", f"tools[{index}].function.name")
        names.add(tool.name)
    return checked


def _tool(tool: Any, param: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"{param} must be an object", param)
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(f'{param}.type must be "function": no other tools are supported', f"{param}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{param}.function must be an object", f"{param}.function")
    param += ".function"
    name = _tool_name(function.get("name"), f"{param}.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{param}.description must be a string", f"{param}.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{param}.strict must be true or false", f"{param}.strict")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    check_schema(parameters, f"{param}.parameters")
    return Tool(name, parameters, description, bool(strict))


def _tool_name(name: Any, param: str) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{param} must be a string that is not empty", param)
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequestError(f"{param} has {len(name)} characters; at most {MAX_NAME_LENGTH} are possible", param)
    if not NAME.fullmatch(name):
        raise InvalidRequestError(f"{param} may consist of letters, digits, '_', '-' and '.' only", param)
    return name


def _choice(choice: Any, names: Sequence[str]) -> ToolChoice:
    if choice is None:
        return ToolChoice("auto" if names else "none")
    if choice == "none":
        return ToolChoice("none")
    name = None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        name = function["name"]
    elif choice not in ("auto", "required"):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required" or an object naming a function', "tool_choice"
        )
    if not names:
        raise InvalidRequestError("tool_choice needs tools; name at least one function in tools", "tool_choice")
    if name is None:
        return ToolChoice(choice)
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names the function {name[:MAX_NAME_LENGTH]!r}, which tools lacks", "tool_choice"
        )
    return ToolChoice("named", name)


def check_schema(schema: Any, param: str) -> None:
    """Refuse what is no JSON Schema of an object, by the keywords that are commonly wrong. Raises InvalidRequestError."""
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{param} must be an object: a JSON Schema", param)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f'{param}.type must be "object"', f"{param}.type")
    todo: list[tuple[Any, str, int, bool]] = [(schema, param, 0, True)]
    num_nodes = 0
    while todo:
        value, where, depth, is_schema = todo.pop()
        num_nodes += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequestError(f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param)
        if num_nodes > MAX_SCHEMA_NODES:
            raise InvalidRequestError(f"{param} has more than {MAX_SCHEMA_NODES} parts", param)
        if is_schema and not isinstance(value, bool):
            if not isinstance(value, Mapping):
                raise InvalidRequestError(f"{where} must be a JSON Schema: an object, true or false", param)
            _check_keywords(value, where, param)
        if isinstance(value, Mapping):
            todo.extend(_children(value, where, depth + 1, is_schema))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            todo.extend((one, f"{where}[{index}]", depth + 1, False) for index, one in enumerate(value))


def _children(value: Mapping, where: str, depth: int, is_schema: bool) -> list[tuple[Any, str, int, bool]]:
    children: list[tuple[Any, str, int, bool]] = []
    for key, below in value.items():
        path = f"{where}.{str(key)[:64]}"
        if is_schema and key in _SCHEMA_MAPS:
            children.extend((one, f"{path}.{str(name)[:64]}", depth + 1, True) for name, one in below.items())
        elif is_schema and key in _SCHEMA_LISTS:
            children.extend((one, f"{path}[{index}]", depth + 1, True) for index, one in enumerate(below))
        else:
            children.append(
                (below, path, depth, is_schema and key in _SCHEMAS and not (key == "items" and isinstance(below, list)))
            )
    return children


def _check_keywords(schema: Mapping, where: str, param: str) -> None:
    def wrong(key: str, must_be: str) -> InvalidRequestError:
        return InvalidRequestError(f"{where}.{key} must be {must_be}", param)

    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not types or not all(isinstance(one, str) and one in _TYPES for one in types):
            raise wrong("type", "one of " + ", ".join(sorted(_TYPES)) + ", or an array of them")
    for key in _SCHEMA_MAPS:
        if key in schema and not isinstance(schema[key], Mapping):
            raise wrong(key, "an object of schemas")
    for key in _SCHEMA_LISTS:
        if key in schema and not (isinstance(schema[key], list) and schema[key]):
            raise wrong(key, "an array of schemas that is not empty")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong("required", "an array of strings")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise wrong("enum", "an array that is not empty")
    if "$ref" in schema and not isinstance(schema["$ref"], str):
        raise wrong("$ref", "a string")
    if "pattern" in schema and not _is_pattern(schema["pattern"]):
        raise wrong("pattern", f"a regular expression of at most {MAX_PATTERN_LENGTH} characters")
    for name in schema.get("patternProperties", ()):
        if not _is_pattern(name):
            raise wrong("patternProperties", "an object whose names are regular expressions")


def _is_pattern(pattern: Any) -> bool:
    """Whether it looks like a regular expression. It is never run here: only its syntax is read."""
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_LENGTH:
        return False
    try:
        re.compile(_NOT_PYTHON.sub("x", pattern).replace("(?<", "(?P<").replace("(?P<=", "(?<=").replace("(?P<!", "(?<!"))
    except (re.error, RecursionError, OverflowError):
        return False
    return True
