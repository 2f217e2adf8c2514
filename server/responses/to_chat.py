"""Converts a request of the Responses API to the equivalent chat request."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import bad_request
from server.ignored import log_once
from server.protocol.common import NO_VERBOSITY
from server.protocol.nested import parse
from server.protocol.responses import (
    FunctionTool,
    JsonSchemaFormat,
    ResponsesRequest,
)
from server.responses import custom_tools
from server.responses.items import as_messages

INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")
"""The second one has no effect: reasoning items contain their whole text, so clients can send them back unchanged."""


def check(request: ResponsesRequest) -> None:
    """Raise ApiError for unsupported features, by name."""
    for name in request.include or ():
        if name not in INCLUDABLE:
            raise bad_request(f"include has {name[:80]!r}, supported are {', '.join(INCLUDABLE)}", "include")
    if request.stream_options is not None:
        if not request.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if request.stream_options.include_obfuscation:
            raise bad_request(
                "stream_options.include_obfuscation is not supported; leave it out or send false", "stream_options"
            )
    reasoning = request.reasoning
    if reasoning is not None and {reasoning.summary, reasoning.generate_summary} & {"concise", "detailed"}:
        raise bad_request(
            "reasoning.summary is not supported beyond auto: reasoning comes whole, as reasoning_text", "reasoning"
        )
    if request.text is not None and request.text.verbosity is not None:
        log_once(f"text.verbosity has no effect: {NO_VERBOSITY}")
    _check_metadata(request.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise bad_request(
                f"metadata[{key[:64]!r}] has a key of {len(key)} and a value of {len(value)} characters, at most 64 and 512 are kept",
                "metadata",
            )


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether logprobs of the answer's tokens are requested."""
    return bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())


def chat_fields(request: ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of a chat request; `items`: the whole conversation, checked. Raises ApiError."""
    messages = as_messages(items, request.instructions)
    if not messages:
        raise bad_request("input is empty; give a text or at least one item", "input")
    fields: dict[str, Any] = {"messages": messages, "stream": bool(request.stream)}
    fields |= request.passed_on()
    renamed = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop": request.stop,
        "max_completion_tokens": request.max_output_tokens,
        "user": request.user,
        "include_reasoning": request.include_reasoning,
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
    }
    fields |= {name: value for name, value in renamed.items() if value is not None}
    if wants_logprobs(request):  # token by token, to separate them from the reasoning's
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0, "stream": True}
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _response_format(request.text.format)
    return fields | _tools(request)


def _response_format(format: Any) -> dict[str, Any]:
    if not isinstance(format, JsonSchemaFormat):
        return {"type": format.type}
    schema = {"name": format.name, "schema": format.schema_, "strict": format.strict, "description": format.description}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = [_as_function(tool, f"tools[{place}]") for place, tool in enumerate(request.tools)]
        if request.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = request.parallel_tool_calls
    choice = request.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        given = choice.get("tools")
        if choice.get("mode") not in ("auto", "required") or not isinstance(given, list) or not given:
            raise bad_request(
                'tool_choice of type allowed_tools must have a mode, auto or required, and tools: [{"type": "function", "name": "…"}, …]',
                "tool_choice",
            )
        allowed = {"mode": choice["mode"], "tools": [_named(tool) for tool in given]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    elif isinstance(choice, Mapping):
        fields["tool_choice"] = _named(choice)
    elif choice is not None and (request.tools or choice not in ("auto", "none")):
        fields["tool_choice"] = choice
    return fields


def _named(choice: Any) -> dict[str, Any]:
    """A tool_choice that names a tool, or one of those that may be called, as chats have it."""
    is_named = (
        isinstance(choice, Mapping) and choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str)
    )
    if not is_named:
        raise bad_request(
            'tool_choice must be none, auto, required, {"type": "function", "name": "…"}, of a custom tool with type custom, or of type '
            "allowed_tools with mode and tools",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _as_function(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    if given.get("type") == "custom":
        return custom_tools.as_function(given, where)
    if given.get("type") != "function":
        raise bad_request(
            f"{where}.type is {given.get('type')!r:.80}, supported are function and custom: this server runs no tools itself",
            "tools",
        )
    tool = parse(FunctionTool, given, where)
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}
