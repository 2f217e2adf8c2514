"""The tools of an Anthropic request, as functions of the chat request: what tool search and tool changes leave of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.errors import bad_request
from server.protocol.anthropic import Tool, ToolAddition, ToolDefinition, ToolReference, ToolRemoval
from server.protocol.nested import parse


def as_functions(given: Sequence[Mapping[str, Any]], blocks: Iterable[Any], chosen: str | None) -> list[dict[str, Any]]:
    """The functions that the model sees at the end of a conversation with these blocks. Raises ApiError.

    A tool with `defer_loading` is left out until a `tool_reference` or a `tool_addition` names it, unless tool_choice does
    (`chosen`), or all tools have it.
    """
    tools: dict[str, Tool] = {}
    for place, each in enumerate(given):
        tool = _checked(each, f"tools[{place}]")
        tools[tool.name] = tool
    loaded, removed = {chosen}, set()
    for block in blocks:
        if isinstance(block, ToolReference):
            loaded.add(block.name_of_tool)
        elif isinstance(block, ToolAddition | ToolRemoval):
            name = _changed(block, tools)
            if isinstance(block, ToolAddition):
                loaded.add(name)
                removed.discard(name)
            else:
                removed.add(name)
    left = {name: tool for name, tool in tools.items() if name not in removed}
    shown = [tool for name, tool in left.items() if name in loaded or not tool.defer_loading]
    return [_function(tool) for tool in shown or left.values()]


def _changed(block: ToolAddition | ToolRemoval, tools: dict[str, Tool]) -> str:
    """The name of the tool that a block adds or removes; a definition is added to the tools."""
    change = block.tool
    if isinstance(change, ToolDefinition):
        tools[change.definition.name] = change.definition
        return change.definition.name
    if change.name_of_tool not in tools:
        raise bad_request(f"a {block.type} names the tool {change.name_of_tool[:80]!r}, which tools does not have", "messages")
    return change.name_of_tool


def _checked(given: Mapping[str, Any], where: str) -> Tool:
    if given.get("type") not in (None, "custom"):
        raise bad_request(
            f"{where}.type is {given['type']!r:.80}; tools that the server runs itself are not supported, only custom",
            param=f"{where}.type",
        )
    return parse(Tool, given, where)


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
