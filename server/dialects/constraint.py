"""Grammars that make a model call the tools it must call."""

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
    """What an output must be for this tool choice; None if it is free. Reasoning stays free: the constraint begins after it.

    Calls are enforced in the model's own format where that is JSON within markers, else as plain JSON. The parser of such an answer
    has `forced=True`. Raises InvalidRequestError. Tools that are `strict` are not constrained when the choice is "auto".
    """
    if not tool_choice.is_forced:
        return None
    chosen = [tool for tool in tools if tool_choice.kind == "required" or tool.name == tool_choice.name]
    special_tokens = special_tokens_of(tokenizer)
    frame = (dialect.frame_for(special_tokens) if dialect else None) or JSON_CALLS.frame
    assert frame is not None
    several = parallel and frame.several and tool_choice.kind == "required"
    after = None if frame.reasoning else start_after_token_ids(reasoning, tokenizer, prompt_text)
    tag = {"type": "structural_tag", "format": _format(chosen, frame, several, lines_before=after is not None)}
    try:
        return StructuredOutputsParams(structural_tag=tag, start_after_token_ids=after)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"calls of these tools cannot be enforced: {error}; pass fewer or simpler tools", "tools"
        ) from None


def start_after_token_ids(reasoning: ReasoningDialect | None, tokenizer: Any, prompt_text: str) -> tuple[int, ...] | None:
    """The tokens after which a constraint on the answer begins; None if there is no reasoning before it."""
    if reasoning is None or tokenizer is None:
        return None
    is_open = reasoning.state_after(prompt_text, special_tokens_of(tokenizer))
    if is_open is False or (is_open is None and not reasoning.expected):
        return None
    return reasoning_end_token_ids(reasoning, tokenizer)


def reasoning_end_token_ids(reasoning: ReasoningDialect, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end the reasoning."""
    end = f"{CHANNEL}final{MESSAGE}" if reasoning.channels else reasoning.end[0]
    return tuple(tokenizer.encode(end, add_special_tokens=False))


def _format(tools: Sequence[Tool], frame: Frame, several: bool, lines_before: bool) -> dict[str, Any]:
    """Calls of these tools as a structural tag's format."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(tool, frame) for tool in tools],
        "separator": frame.between_calls,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    parts = [_text(frame.before_calls), calls, _text(frame.after_calls)]
    if frame.reasoning:
        before, after = frame.reasoning
        thought = {"type": "tag", "begin": before, "content": {"type": "any_text"}, "end": after}
        parts.insert(0, {"type": "or", "elements": [thought, _text("")]})
    if lines_before:  # models end their reasoning with an empty line
        parts.insert(0, {"type": "or", "elements": [_text(""), _text("\n"), _text("\n\n")]})
    return {"type": "sequence", "elements": parts}


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
