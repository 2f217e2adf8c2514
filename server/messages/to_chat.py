"""Converts an Anthropic request to the equivalent chat request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.thinking import PARAM as THINKING_BUDGET
from server.errors import bad_request
from server.messages.tools import as_functions
from server.protocol.anthropic import (
    ImageBlock,
    InputMessage,
    MessagesRequest,
    Prompt,
    TextBlock,
    ThinkingBlock,
    ToolAddition,
    ToolChoice,
    ToolReference,
    ToolRemoval,
    ToolResultBlock,
    ToolUseBlock,
)
from server.protocol.nested import parse

BLOCKS: dict[str, dict[str, Any]] = {
    "user": {"text": TextBlock, "image": ImageBlock, "tool_result": ToolResultBlock, "tool_reference": ToolReference},
    "assistant": {"text": TextBlock, "tool_use": ToolUseBlock, "thinking": ThinkingBlock},
    "system": {"text": TextBlock, "tool_addition": ToolAddition, "tool_removal": ToolRemoval},
    "system prompt": {"text": TextBlock},
    "tool": {"text": TextBlock, "image": ImageBlock, "tool_reference": ToolReference},
}
"""The block types allowed for each role, in `system`, and in the result of a tool."""


def prompt_fields(request: Prompt) -> dict[str, Any]:
    """The fields of a chat request that determine its prompt. Raises ApiError that names the block."""
    for edit in (request.context_management and request.context_management.edits) or ():
        if edit.type != "clear_thinking_20251015" or edit.keep != "all":
            raise bad_request(
                f"context_management has the edit {edit.type[:80]!r}; only clear_thinking_20251015 with keep: all, which clears "
                "nothing, is supported; send shorter messages",
                "context_management",
            )
    messages = [] if request.system is None else [{"role": "system", "content": _text(request.system, "system")}]
    seen: list[Any] = []
    for place, message in enumerate(request.messages):
        messages += _as_chat_messages(message, f"messages[{place}].content", seen)
    if not messages:
        raise bad_request("messages has nothing but changes of tools; add the user's message", "messages")
    fields: dict[str, Any] = {**request.passed_on(), "messages": messages}
    if messages[-1]["role"] == "assistant":  # the answer continues it
        if set(messages[-1]) != {"role", "content"}:
            raise bad_request(
                "the last message is the assistant's and holds more than text; end with the user's", param="messages"
            )
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    chosen = None if request.tool_choice is None else request.tool_choice.name
    if tools := as_functions(request.tools or (), seen, chosen):
        fields["tools"] = tools
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    if request.output_config is not None and request.output_config.effort is not None:
        fields["reasoning_effort"] = request.output_config.effort
    return fields


def chat_fields(request: MessagesRequest, *, can_limit_thinking: bool = False) -> dict[str, Any]:
    """Build the whole chat request. can_limit_thinking: whether the model's thinking can be cut at a budget. Raises ApiError."""
    fields = prompt_fields(request)
    if can_limit_thinking and request.thinking is not None and request.thinking.type == "enabled":
        fields.setdefault(THINKING_BUDGET, request.thinking.budget_tokens)
    fields |= {"max_completion_tokens": request.max_tokens, "stream": bool(request.stream)}
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    for name in ("temperature", "top_p"):
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    config = request.output_config
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def enable_thinking(request: Prompt) -> bool | None:
    """Whether the template is asked to enable reasoning; None: the template's default. Raises ApiError."""
    thinking = request.thinking
    if thinking is None or thinking.type == "adaptive":
        return None
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_request("thinking.budget_tokens is missing; thinking of type enabled has one", "thinking")
        if isinstance(request, MessagesRequest) and thinking.budget_tokens >= request.max_tokens:
            raise bad_request(
                f"thinking.budget_tokens is {thinking.budget_tokens}, must be below max_tokens, which is {request.max_tokens}",
                "thinking",
            )
    return thinking.type == "enabled"


def _as_chat_messages(message: InputMessage, where: str, seen: list[Any]) -> list[dict[str, Any]]:
    """Convert one message; a user message with tool results becomes one message per result and one for the rest.

    Appends its blocks, and those of the results, to `seen`.
    """
    blocks = _blocks(message.content, where, message.role)
    seen += blocks
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, f"{where}[{place}].content", seen)}
        for place, block in enumerate(blocks)
        if isinstance(block, ToolResultBlock)
    ]
    content = _content(blocks)
    has_text = any(isinstance(block, TextBlock | ImageBlock) for block in blocks)
    if message.role != "assistant":
        changes_tools = any(isinstance(block, ToolAddition | ToolRemoval | ToolReference) for block in blocks)
        return [*results, {"role": message.role, "content": content}] if has_text or not (results or changes_tools) else results
    chat: dict[str, Any] = {"role": "assistant"}
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if has_text or not calls:
        chat["content"] = content
    if calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
            for call in calls
        ]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thoughts:
        chat["reasoning"] = thoughts
    return [chat]


def _blocks(content: str | Sequence[Mapping[str, Any]], where: str, role: str) -> list[Any]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    known, blocks = BLOCKS[role], []
    for place, block in enumerate(content):
        kind = block.get("type")
        model = known.get(kind) if isinstance(kind, str) else None
        if model is None:
            raise bad_request(
                f"{where}[{place}].type is {kind!r:.80}; supported are {', '.join(known)} in a message of the {role}",
                param=f"{where}[{place}].type",
            )
        blocks.append(parse(model, block, f"{where}[{place}]"))
    return blocks


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    return "".join(block.text for block in _blocks(content, where, "system prompt"))


def _content(blocks: Sequence[Any], before: str = "", after: str = "") -> str | list[dict[str, Any]]:
    """The text of blocks, between others; or parts, if there are images among them."""
    texts = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return before + texts + after
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}]
    for block in blocks:
        if isinstance(block, ImageBlock):
            parts.append({"type": "image_url", "image_url": block.address})
        elif isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
    return [part for part in (*parts, {"type": "text", "text": after}) if part.get("text") != ""]


def _result(block: ToolResultBlock, where: str, seen: list[Any]) -> str | list[dict[str, Any]]:
    """Content of a call's result for the model; of a search for tools, their names."""
    parts = _blocks(block.content or "", where, "tool")
    seen += parts
    found = ""
    if names := [part.name_of_tool for part in parts if isinstance(part, ToolReference)]:
        has_text = any(isinstance(part, TextBlock) and part.text for part in parts)
        found = "\n" * has_text + f"Tools found: {', '.join(names)}"
    return _content(parts, "Error: " if block.is_error else "", found)  # chat templates have no other place for it


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice.name is missing; tool_choice of type tool names one", param="tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
