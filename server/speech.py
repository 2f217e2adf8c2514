"""Formats of tool calls and reasoning of the served model: determined once, applied to each conversation."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.outputs import CompletionOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer
from server.chat_deltas import ChatDelta, with_pieces
from server.dialects import (
    HF,
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    Reasoning,
    ReasoningDialect,
    StreamParser,
    Tool,
    ToolChoice,
    ToolDialect,
    by_name,
    check_known,
    check_tools,
    find_dialect_names,
    response_template_of,
    special_tokens_of,
    start_after_token_ids,
    tool_constraint,
)
from server.dialects.plugins import reasoning_dialects_of, tool_dialects_of
from server.errors import bad_request
from server.http_metrics import RequestType
from server.options import ChatOptions


class Speech:
    """The dialects of one model. Raises ConfigError for unknown dialect names."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, options: ChatOptions):
        self._tokenizer = tokenizer
        self._options = options
        templates = tokenizer.chat_templates
        source = chat_template or templates.get("tool_use") or templates.get("default")
        found_tool, found_reasoning = find_dialect_names(source, tokenizer)
        if HF in (options.tool_call_parser, options.reasoning_parser):  # which reads both
            found_tool = found_reasoning = HF
        self.tool_name = _named(options.tool_call_parser, found_tool)
        self.reasoning_name = _named(options.reasoning_parser, found_reasoning)
        self._special_tokens = special_tokens_of(tokenizer)
        try:
            self._tool, self._reasoning = _dialects(options, self.tool_name, self.reasoning_name, tokenizer)
            both = self._tool, self._reasoning
            self._keeps_special = any(dialect is not None and dialect.needs_special_tokens(tokenizer) for dialect in both)
        except ConfigError:
            raise
        except Exception as error:
            plugins = " and ".join(filter(None, (options.tool_parser_plugin, options.reasoning_parser_plugin)))
            if not plugins:
                raise
            raise ConfigError(f"a dialect of the plugins ({plugins}) failed: {type(error).__name__}: {error}") from error
        self.note_tool_parser: Callable[[RequestType, bool, bool], None] = lambda request_type, streams, found_calls: None
        """Called for each answer that was searched for tool calls, when it ends."""

    def check(self, tools: Any, tool_choice: Any) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Check a request's tools and tool choice against this model. Raises ApiError or InvalidRequestError."""
        checked, choice = check_tools(tools, tool_choice)
        if choice.kind == "auto" and checked:
            if not self._options.enable_auto_tool_choice:
                raise bad_request('tool_choice "auto" is switched off (--no-enable-auto-tool-choice)', "tool_choice")
            if self._tool is None:
                raise bad_request(
                    'tool_choice "auto" needs to know how this model writes tool calls, which its chat template does not show; '
                    'start the server with --tool-call-parser, or send "required" or the name of a function',
                    "tool_choice",
                )
        return checked, choice

    def prepared(
        self,
        params: SamplingParams,
        tools: Sequence[Tool],
        choice: ToolChoice,
        prompt_text: str,
        *,
        parallel: bool,
        include_reasoning: bool,
        request_type: RequestType = "other",
    ) -> tuple[SamplingParams, "AnswerReader | None"]:
        """Adapt the parameters to tools and reasoning; return them with the reader of the answers (None: plain text)."""
        tool = self._tool if tools and choice.kind != "none" else None
        if choice.is_forced and params.structured_outputs is not None:
            raise bad_request(
                "response_format or structured_outputs and tool_choice both say what the answer must be; use one",
                "tool_choice",
            )
        if params.structured_outputs is None:
            constraint = tool_constraint(
                tools,
                choice,
                parallel,
                self._tool,
                reasoning=self._reasoning,
                tokenizer=self._tokenizer,
                prompt_text=prompt_text,
            )
        else:
            constraint = self.constrained(params.structured_outputs, prompt_text)
        if constraint is not None:
            params = dataclasses.replace(params, structured_outputs=constraint)
        if tool is None and self._reasoning is None and not choice.is_forced:
            return params, None
        streams = params.output_kind is RequestOutputKind.DELTA
        note_calls = None
        if tool is not None or choice.is_forced:
            note_calls = partial(self.note_tool_parser, request_type, streams)
        drops_special = self._keeps_special and params.skip_special_tokens
        if drops_special:
            params = dataclasses.replace(params, skip_special_tokens=False)
        if self._reasoning is not None and not streams:
            params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)  # so that reasoning tokens are counted
        reader = AnswerReader(
            tool,
            self._reasoning,
            {
                "tools": tools,
                "forced": choice.is_forced,
                "parallel": parallel,
                "prompt_text": prompt_text,
                "special_tokens": self._special_tokens,
                "drop_special_tokens": drops_special,
                "hold_calls": not streams,
            },
            include_reasoning=include_reasoning,
            note_calls=note_calls,
        )
        return params, reader

    def constrained(self, form: StructuredOutputsParams, prompt_text: str) -> StructuredOutputsParams:
        """The constraint of an answer to this prompt, which applies after the reasoning."""
        after = start_after_token_ids(self._reasoning, self._tokenizer, prompt_text)
        return dataclasses.replace(form, start_after_token_ids=after)

    @property
    def reads_answers(self) -> bool:
        """Whether the model's answers may have reasoning or tool calls in a model-specific format."""
        return self._tool is not None or self._reasoning is not None


class AnswerReader:
    """Reads the answers of one conversation."""

    def __init__(
        self,
        tool: ToolDialect | None,
        reasoning: ReasoningDialect | None,
        settings: Mapping[str, Any],
        *,
        include_reasoning: bool,
        note_calls: Callable[[bool], None] | None = None,
    ):
        """note_calls: called for each answer when it ends, with whether calls were found."""
        self._tool = tool
        self._reasoning = reasoning
        self._settings = settings
        self._include_reasoning = include_reasoning
        self._note_calls = note_calls
        self._num_reasoning_tokens = 0
        self._parsers: dict[int, StreamParser] = {}

    def read(self, answer: CompletionOutput, reason: str | None) -> list[ChatDelta]:
        """Parse an update of an answer; `reason` is its finish reason, if it ended."""
        parser = self._parsers.get(answer.index)
        if parser is None:
            parser = self._parsers[answer.index] = StreamParser(self._tool, self._reasoning, **self._settings)
        was_reasoning = parser.in_reasoning
        pieces = parser.feed(answer.text)
        is_all_reasoning = was_reasoning and parser.in_reasoning
        if reason is not None:
            pieces += parser.finish()
            reason = parser.finish_reason(reason)
            if self._note_calls is not None:
                self._note_calls(parser.num_calls > 0)
        num_letters = sum(len(piece.text) for piece in pieces if isinstance(piece, Reasoning))
        has_reasoning = num_letters > 0 or was_reasoning or parser.in_reasoning
        if is_all_reasoning:
            self._num_reasoning_tokens += len(answer.token_ids)
        elif num_letters:  # one update has tokens from both sides of a marker
            share = min(1.0, num_letters / max(1, len(answer.text)))
            self._num_reasoning_tokens += math.ceil(share * len(answer.token_ids))
        delta = ChatDelta(answer.index, finish_reason=reason, stop_reason=answer.stop_reason)
        if has_reasoning and not self._include_reasoning:  # nor may tokens reveal text that is left out
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        else:
            delta.token_ids, delta.logprobs = answer.token_ids, answer.logprobs
        return with_pieces(delta, pieces)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens of all answers; None for a model that does not reason."""
        if self._reasoning is None:
            return None
        return self._num_reasoning_tokens


def check_names(options: ChatOptions) -> None:
    """Raise ConfigError for unknown dialect names and for plugins that cannot be used, without a model."""
    for option, name, plugin in (
        ("tool_call_parser", options.tool_call_parser, options.tool_parser_plugin),
        ("reasoning_parser", options.reasoning_parser, options.reasoning_parser_plugin),
    ):
        if plugin is not None and name is None:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"the plugin {plugin} is given without {flag}, which names one of its dialects; pass {flag} too")
    _known(options, _named(options.tool_call_parser, None), _named(options.reasoning_parser, None))


def _known(
    options: ChatOptions, tool_name: str | None, reasoning_name: str | None
) -> tuple[dict[str, ToolDialect], dict[str, ReasoningDialect]]:
    """All dialects, those of plugins first, among which these names must be. Raises ConfigError."""
    tools = {**TOOL_DIALECTS, **tool_dialects_of(options.tool_parser_plugin)}
    reasonings = {**REASONING_DIALECTS, **reasoning_dialects_of(options.reasoning_parser_plugin)}
    try:
        check_known(tool_name, reasoning_name, tools, reasonings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tools, reasonings


def _dialects(
    options: ChatOptions, tool_name: str | None, reasoning_name: str | None, tokenizer: Tokenizer
) -> tuple[ToolDialect | None, ReasoningDialect | None]:
    tools, reasonings = _known(options, tool_name, reasoning_name)
    tokens, template = tokenizer.added_tokens.values(), response_template_of(tokenizer)
    try:
        return by_name(tool_name, reasoning_name, tokens, template, tools=tools, reasonings=reasonings)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _named(option: str | None, found: str | None) -> str | None:
    """The dialect's name: the option's value, else the one detected in the chat template."""
    return found if option is None else None if option == "none" else option
