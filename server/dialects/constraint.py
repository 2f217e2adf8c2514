"""Builds grammars that force a model to call the required tools."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.structured_outputs import StructuredOutputsParams
from server.dialects.dialect import INDEX, Frame, ReasoningDialect, ToolDialect, special_tokens_of
from server.dialects.harmony import CHANNEL, MESSAGE
from server.dialects.json_calls import JSON_CALLS
from server.dialects.tools import Tool, ToolChoice


def tool_constraint(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    parallel: bool,
    dialect: ToolDialect | None,
    *,
    reasoning: ReasoningDialect | None = None,
    tokenizer: Any = None,
    prompt_text: str = "",
) -> StructuredOutputsParams | None:
    """The constraint for this tool choice; None if the output is free. It begins after the reasoning, which stays free.

    Forced calls use the model's own format where that is JSON within markers, else plain JSON; their parser has `forced=True`.
    With "auto" and `strict` tools the text is free, but a call's marker must be followed by a valid call, where the format
    has such a marker. Raises InvalidRequestError.
    """
    special_tokens = special_tokens_of(tokenizer)
    frame = dialect.frame_for(special_tokens) if dialect else None
    after = start_after_token_ids(reasoning, tokenizer, prompt_text)
    if tool_choice.is_forced:
        chosen = [tool for tool in tools if tool_choice.kind == "required" or tool.name == tool_choice.name]
        frame = frame or JSON_CALLS.frame
        assert frame is not None
        after = None if frame.reasoning else after
        several = parallel and frame.several and tool_choice.kind == "required"
        tag = _enforced(chosen, frame, several, lines_before=after is not None)
    elif tool_choice.kind == "auto" and any(tool.strict for tool in tools) and dialect and frame:
        trigger = frame.before_calls or next((one for one in dialect.openings if frame.before_name.startswith(one)), "")
        may_think_first = reasoning is not None and after is None and reasoning.state_after(prompt_text, special_tokens) is None
        if not trigger or frame.reasoning or may_think_first:
            return None
        tag = _where_triggered(tools, frame, trigger, parallel)
    else:
        return None
    try:
        return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag}, start_after_token_ids=after)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"calls of these tools cannot be enforced: {error}; pass fewer or simpler tools", "tools"
        ) from None


def start_after_token_ids(reasoning: ReasoningDialect | None, tokenizer: Any, prompt_text: str) -> tuple[int, ...] | None:
    """The tokens after which a constraint on the answer begins; None if no reasoning precedes it."""
    if reasoning is None or tokenizer is None:
        return None
    is_open = reasoning.state_after(prompt_text, special_tokens_of(tokenizer))
    if is_open is False or (is_open is None and not reasoning.expected):
        return None
    return reasoning_end_token_ids(reasoning, tokenizer, prompt_text)


def reasoning_end_token_ids(reasoning: ReasoningDialect, tokenizer: Any, prompt_text: str = "") -> tuple[int, ...]:
    """The tokens that end the reasoning."""
    end = f"{CHANNEL}final{MESSAGE}" if reasoning.channels else reasoning.end_after(prompt_text)
    return tuple(tokenizer.encode(end, add_special_tokens=False))


def _calls(tools: Sequence[Tool], frame: Frame, several: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_tag(tool, frame) for tool in tools],
        "separator": frame.between_calls,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _enforced(tools: Sequence[Tool], frame: Frame, several: bool, lines_before: bool) -> dict[str, Any]:
    """A structural-tag format that allows only calls of these tools."""
    calls = _calls(tools, frame, several)
    parts = [_text(frame.before_calls), calls, _text(frame.after_calls)]
    if frame.reasoning:
        before, after = frame.reasoning
        thought = {"type": "tag", "begin": before, "content": {"type": "any_text"}, "end": after}
        parts.insert(0, {"type": "or", "elements": [thought, _text("")]})
    if lines_before:  # models end their reasoning with an empty line
        parts.insert(0, {"type": "or", "elements": [_text(""), _text("\n"), _text("\n\n")]})
    return {"type": "sequence", "elements": parts}


_ANY = {"additionalProperties": True}


def _where_triggered(tools: Sequence[Tool], frame: Frame, trigger: str, parallel: bool) -> dict[str, Any]:
    """A format of free text in which a marker begins calls. Tools that are not strict accept any object."""
    lax = [tool if tool.strict else dataclasses.replace(tool, parameters=_ANY) for tool in tools]
    if frame.before_calls:
        several = parallel and frame.several
        tags = [{"type": "tag", "begin": trigger, "content": _calls(lax, frame, several), "end": frame.after_calls}]
    else:
        tags = [_tag(tool, frame) for tool in lax]
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def _tag(tool: Tool, frame: Frame) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "json_schema", "json_schema": tool.schema}
    after_name, number, rest = frame.after_name.partition(INDEX)
    if number:
        content = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]{1,3}"}, _text(rest), content]}
    return {
        "type": "tag",
        "begin": frame.before_name + tool.name + after_name,
        "content": content,
        "end": frame.after_arguments,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
