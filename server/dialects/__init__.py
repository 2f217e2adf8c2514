"""Formats of tool calls and reasoning: a table and a few lines for each format, and one parser for all of them."""

from server.dialects.constraint import reasoning_end_token_ids, start_after_token_ids, tool_constraint
from server.dialects.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from server.dialects.dialect import ReasoningDialect, ToolDialect, special_tokens_of
from server.dialects.registry import (
    HF,
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    by_name,
    check_known,
    find_dialect_names,
    response_template_of,
)
from server.dialects.stream_parser import StreamParser
from server.dialects.tools import AskedChoice, Tool, ToolChoice, check_tools

__all__ = [
    "HF",
    "REASONING_DIALECTS",
    "TOOL_DIALECTS",
    "AskedChoice",
    "Content",
    "Delta",
    "Reasoning",
    "ReasoningDialect",
    "StreamParser",
    "Tool",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "ToolDialect",
    "by_name",
    "check_known",
    "check_tools",
    "find_dialect_names",
    "reasoning_end_token_ids",
    "response_template_of",
    "special_tokens_of",
    "start_after_token_ids",
    "tool_constraint",
]
