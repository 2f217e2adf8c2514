"""Grammars that make a model call the tools it must call."""

import json
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.structured_outputs import MAX_SPEC_BYTES, StructuredOutputsParams
from server.dialects.dialect import INDEX, Frame, ReasoningDialect, ToolDialect, special_tokens_of
from server.dialects.harmony import CHANNEL, MESSAGE
from server.dialects.json_calls import JSON_CALLS
from server.dialects.markers import markers_of
from server.dialects.tools import Tool, ToolChoice

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models were trained to write it; and nobody can wait for white space without end."""


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
    grammar = _grammar(chosen, frame, several, tokenizer, lines_before=after is not None)
    if len(grammar) > MAX_SPEC_BYTES:
        raise InvalidRequestError(
            f"tools have schemas of {len(grammar)} bytes together; calls can be enforced for {MAX_SPEC_BYTES}; pass fewer",
            "tools",
        )
    return StructuredOutputsParams(grammar=grammar, start_after_token_ids=after)


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


def _grammar(tools: Sequence[Tool], frame: Frame, several: bool, tokenizer: Any, lines_before: bool) -> str:
    """A Lark grammar of calls of these tools."""

    def quoted(text: str) -> str:
        return _lark_text(text, tokenizer)

    more = f"({quoted(frame.between_calls)} call)*" if several else ""
    start = f"{quoted(frame.before_calls)} call {more} {quoted(frame.after_calls)}"
    if lines_before:  # models end their reasoning with an empty line
        start = rf'("\n" | "\n\n")? {start}'
    rules = ["%llguidance {}"]
    if frame.reasoning:
        before, after = frame.reasoning
        start = f"reasoning? {start}"
        rules.append(f"reasoning: {quoted(before)} ANYTHING {quoted(after)}")
        rules.append(r"ANYTHING: /(.|\n)*/")
    rules.append(f"start: {start}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        schema = json.dumps({**tool.schema, "x-guidance": _JSON_STYLE})
        rules.append(
            f"call_{index}: {quoted(frame.before_name + tool.name + frame.after_name)} arguments_{index} {quoted(frame.after_arguments)}"
        )
        rules.append(f"arguments_{index}: %json {schema}")
    return "\n".join(rules)


def _lark_text(text: str, tokenizer: Any) -> str:
    """A text in Lark, with special tokens by their ids."""
    markers = markers_of(*special_tokens_of(tokenizer))
    pieces: list[str] = []

    def literal(text: str) -> None:
        plain, number, rest = text.partition(INDEX)
        if plain:
            pieces.append(json.dumps(plain))
        if number:
            pieces.append("/[0-9]{1,3}/")
            literal(rest)

    at = 0
    while found := markers.search(text, at):
        literal(text[at : found[0]])
        pieces.append(f"<[{tokenizer.convert_token_to_id(text[found[0] : found[1]])}]>")
        at = found[1]
    literal(text[at:])
    return " ".join(pieces)
