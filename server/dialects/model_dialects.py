"""What one model speaks, and what that means for one answer: how it is sampled and how it is read."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import text_stream
from jaxllm.text.tokenizer import Tokenizer
from server.dialects.constraint import start_after_token_ids, tool_constraint
from server.dialects.dialect import special_tokens_of
from server.dialects.registry import by_name, find_dialect_names
from server.dialects.stream_parser import StreamParser
from server.dialects.tools import Tool, ToolChoice

MAX_TAIL_TOKENS = 1024
"""Tokens at a prompt's end in which the opening of a reasoning block is looked for."""


class ModelDialects:
    """The dialects of one model, as its flags or its chat template say."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ):
        """A parser's name None: as the template shows; "none": no tools, reasoning is content. Raises ValueError for others."""
        found = find_dialect_names(chat_template, tokenizer)
        names = [given or shown for given, shown in zip((tool_call_parser, reasoning_parser), found, strict=True)]
        self.tool_name, self.reasoning_name = (None if name == "none" else name for name in names)
        self.tool, self.reasoning = by_name(self.tool_name, self.reasoning_name)
        self.refuses_tools = tool_call_parser == "none"
        self.tokenizer = tokenizer

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts that `skip_special_tokens` leaves out."""
        return special_tokens_of(self.tokenizer)

    def answer(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        prompt_token_ids: Sequence[int],
        *,
        parallel: bool = True,
        include_reasoning: bool = True,
        hold_calls: bool = False,
    ) -> "Answer":
        """How one prompt is to be answered. `hold_calls`: see `StreamParser`. Raises InvalidRequestError."""
        if self.refuses_tools and choice.kind != "none":
            raise InvalidRequestError(
                'tools are switched off on this server (--tool-call-parser none); use tool_choice "none"', "tools"
            )
        if choice.kind == "auto" and self.tool is None:
            raise InvalidRequestError(
                "the model's chat template shows no known format of tool calls; start the server with --tool-call-parser, "
                'or use tool_choice "required", "none" or a named function',
                "tool_choice",
            )
        return Answer(self, tuple(tools), choice, tuple(prompt_token_ids), parallel, include_reasoning, hold_calls)


@dataclass(frozen=True)
class Answer:
    """How one prompt is to be answered: once, or n times alike."""

    dialects: ModelDialects
    tools: tuple[Tool, ...]
    choice: ToolChoice
    prompt_token_ids: tuple[int, ...]
    parallel: bool
    include_reasoning: bool
    hold_calls: bool

    @cached_property
    def prompt_text(self) -> str:
        """The prompt's end, as far as it tells of reasoning."""
        return self.dialects.tokenizer.decode(self.prompt_token_ids[-MAX_TAIL_TOKENS:])

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether markers are among the special tokens, so that the parser has to see these."""
        dialects = self.dialects
        tool = dialects.tool if self.choice.kind != "none" else None
        return any(dialect.needs_special_tokens(dialects.tokenizer) for dialect in (tool, dialects.reasoning) if dialect)

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """The request's parameters with what the answer needs: enforced calls, a constraint that waits for the end of reasoning,
        special tokens in the text. Raises InvalidRequestError for two constraints.
        """
        dialects, structured = self.dialects, params.structured_outputs
        calls = tool_constraint(
            self.tools,
            self.choice,
            self.parallel,
            dialects.tool,
            reasoning=dialects.reasoning,
            tokenizer=dialects.tokenizer,
            prompt_text=self.prompt_text,
        )
        if structured is not None and calls is not None:
            raise InvalidRequestError(
                "tool_choice enforces calls and the format of the output is constrained too; use one", "tool_choice"
            )
        if structured is not None and structured.start_after_token_ids is None:
            after = start_after_token_ids(dialects.reasoning, dialects.tokenizer, self.prompt_text)
            structured = dataclasses.replace(structured, start_after_token_ids=after)
        skips = params.skip_special_tokens and not self.keeps_special_tokens
        return dataclasses.replace(params, structured_outputs=calls or structured, skip_special_tokens=skips)

    def parser(self, *, skip_special_tokens: bool = True) -> StreamParser:
        """A parser for one answer. `skip_special_tokens` is what the request said."""
        return StreamParser(
            self.dialects.tool if self.choice.kind != "none" else None,
            self.dialects.reasoning,
            tools=self.tools,
            forced=self.choice.is_forced,
            parallel=self.parallel,
            prompt_text=self.prompt_text,
            include_reasoning=self.include_reasoning,
            special_tokens=self.dialects.special_tokens,
            drop_special_tokens=skip_special_tokens and self.keeps_special_tokens,
            hold_calls=self.hold_calls,
        )

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens of a whole answer are reasoning, its markers included."""
        if self.dialects.reasoning is None:
            return 0
        parser = self.parser()
        stream = text_stream(
            self.dialects.tokenizer, self.prompt_token_ids[-16:], skip_special_tokens=not self.keeps_special_tokens
        )
        for token_id in token_ids:
            parser.feed(stream.push(token_id), 1)
        return parser.num_reasoning_tokens
