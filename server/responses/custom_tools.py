"""Tools of type `custom`, which take plain text: the model sees functions whose only argument is that text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from server.errors import bad_request
from server.protocol.nested import parse
from server.protocol.responses import CustomTool

INPUT = "input"
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r"""(?:
        [^"\\] | \\[^u]
        | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
        | \\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))
    )*""",
    re.VERBOSE,
)
"""Characters of a JSON string that are whole: no cut escape, and no first half of a surrogate pair at the end."""


def as_function(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function that stands for a custom tool, in a chat request. Raises ApiError."""
    tool = parse(CustomTool, given, where)
    if tool.format is not None and tool.format.type != "text":
        raise bad_request(
            f"{where}.format is of type {tool.format.type[:40]!r}; custom tools take plain text alone: leave format out, or make it "
            "a function whose parameters have a pattern",
            "tools",
        )
    text = {"type": "string", "description": "Plain text: the whole input of the tool."}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}}


def as_arguments(text: str) -> str:
    """The arguments of the function for an input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input in complete arguments; arguments of another form are the input themselves."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return _whole_pairs(text) if isinstance(text, str) else arguments


class InputReader:
    """Reads the input while the arguments arrive in fragments."""

    def __init__(self) -> None:
        self._pending = ""
        """Arguments that are not read yet."""
        self._is_inside = False
        """Whether the input's opening quote was read."""

    def feed(self, fragment: str) -> str:
        """The part of the input that a fragment completes."""
        self._pending += fragment
        if not self._is_inside:
            head = _HEAD.match(self._pending)
            if head is None:
                return ""
            self._is_inside, self._pending = True, self._pending[head.end() :]
        end = _CHARACTERS.match(self._pending).end()  # type: ignore[union-attr]  # it matches the empty text
        text, self._pending = self._pending[:end], self._pending[end:]
        return _whole_pairs(json.loads(f'"{text}"', strict=False)) if text else ""


def _whole_pairs(text: str) -> str:
    """The text with half surrogate pairs replaced, which no reply can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
