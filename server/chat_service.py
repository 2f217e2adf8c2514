"""Turns conversations into message deltas: shared by chat completions, responses, messages and batches.

Independent of HTTP and of the reply formats of these APIs.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError
from jaxllm.media import ProcessedMedia
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxllm.request_options import NO_OPTIONS, RequestOptions
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.prompt_media import with_processed
from server.chat_deltas import ChatDelta, ToolCallDelta, join_into
from server.chat_encoding import ChatEncoder
from server.chat_images import ChatImages
from server.dialects import AskedChoice, check_tools
from server.endings import end_of
from server.errors import bad_request, constraint_error
from server.http_metrics import RequestType
from server.options import ChatOptions, LimitOptions
from server.prompts import check_length, truncated
from server.speech import AnswerReader, Speech
from server.template_process import MAX_PROCESSES, TemplateProcesses
from server.usage import Usage, kv_transfer_of, multimodal_tokens
from server.work import WorkPool, in_one_piece

__all__ = ["ChatDelta", "ChatService", "Conversation", "PreparedChat", "ToolCallDelta"]


@dataclass(kw_only=True)
class Conversation:
    """A conversation with all its settings."""

    messages: Sequence[Mapping[str, Any]]
    """In OpenAI's shape: role, content, tool_calls, tool_call_id, name."""
    params: SamplingParams
    """max_tokens None: up to the context length."""
    beam_search: BeamSearchParams | None = None
    """If set, runs a beam search; `params` then gives only the number of answers and the output format."""
    request_id: str
    request_type: RequestType = "chat_completions"
    """For metrics."""
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: AskedChoice | None = None
    """Both in OpenAI's shape."""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Values of the template's variables."""
    reasoning_effort: str | None = None
    """A hint for templates that read it."""
    enable_thinking: bool | None = None
    """A hint for templates that read it."""
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    """How images are prepared, over the server's settings."""
    is_converted: bool = False
    """Whether it was a request of another API: its messages are not as the client wrote them, so errors count images."""
    constraint_param: str = "structured_outputs"
    """The client's name for the field that constrains the answer, for errors."""
    asked_tokens: int | None = None
    """The client's limit of output tokens, which truncate_prompt_tokens -1 leaves room for; None: the client has set none."""
    options: RequestOptions = NO_OPTIONS
    adapter: str | None = None
    """Name of a loaded LoRA adapter."""
    num_bytes: int | None = None
    """About how large the messages are; None: as the body."""


class Rendered(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]
    """With a placeholder for each token of the images."""
    messages: list[dict[str, Any]]
    """With marks in place of the images."""
    images: Sequence[ProcessedMedia]

    @property
    def prompt(self) -> Any:
        """For the engine."""
        return with_processed({"prompt_token_ids": self.token_ids}, self.images)


@dataclass
class PreparedChat:
    """A fully checked conversation that the engine accepts."""

    conversation: Conversation
    request: ParentRequest
    usage: Usage
    """Updated while the answer is streamed."""
    reader: AnswerReader | None = None
    """Extracts tool calls and reasoning from the answers; None: they are plain text."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Set by the first output."""
    metrics: RequestMetrics | None = None
    kv_transfer: Mapping[str, Any] = field(default_factory=dict)
    """The field `kv_transfer_params` of the reply, set by the last output; empty: the reply has none."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The rendered conversation as token ids."""
        return self.request.prompt_token_ids

    def deltas_of(self, output: RequestOutput, end_of: Callable[[CompletionOutput], str | None] = end_of) -> list[ChatDelta]:
        """Take in an output of the engine. `end_of`: the finish reason of an answer; raises ApiError for failures."""
        usage, self.metrics, self.kv_transfer = self.usage, output.metrics, kv_transfer_of(output)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        usage.set_cached(output)
        deltas: list[ChatDelta] = []
        for answer in output.outputs:
            usage.completion_tokens += len(answer.token_ids)
            reason = end_of(answer)
            if self.reader is not None:
                deltas += self.reader.read(answer, reason)
                usage.reasoning_tokens = self.reader.num_reasoning_tokens
                continue
            delta = ChatDelta(answer.index, answer.text, "", [], answer.token_ids, answer.logprobs)
            delta.finish_reason, delta.stop_reason = reason, answer.stop_reason
            deltas.append(delta)
        return deltas


class ChatService:
    """Answers conversations with one engine."""

    def __init__(
        self,
        engine: AsyncLLM,
        options: ChatOptions,
        limits: LimitOptions,
        work: WorkPool,
        *,
        queue_timeout_seconds: float | None = None,
    ):
        self._engine = engine
        self._work = work
        self._queue_timeout_seconds = queue_timeout_seconds
        self._options = options
        self.note_request: Callable[[ParentRequest], None] = lambda request: None
        """Called for each prepared request."""
        self._templates: TemplateProcesses | None = None
        self._encoder: ChatEncoder | None = None
        self._images = ChatImages(engine, limits)
        tokenizer = engine.input_processor.tokenizer
        if tokenizer is not None:
            self._templates = TemplateProcesses(tokenizer, options)
            self.speech = Speech(tokenizer, engine.chat_template, options)
            self._encoder = ChatEncoder(tokenizer, self._templates, engine.max_model_len, engine.input_processor.media)
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "jaxllm-chat")
        """Separate threads, so that slow templates do not delay other requests."""

    def warm_up(self) -> None:
        """Start a template process before the first request."""
        if self._templates is not None:
            self._threads.submit(self._templates.warm_up)

    def close(self) -> None:
        """Stop threads and processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._images.close()
        if self._templates is not None:
            self._templates.close()

    async def render(self, conversation: Conversation) -> Rendered:
        """Render and encode a conversation, and prepare its images. Raises ApiError or InvalidRequestError."""
        if self._encoder is None:
            raise bad_request("there is no tokenizer (--skip-tokenizer-init); send token ids to /v1/completions", "messages")
        if conversation.add_generation_prompt and conversation.continue_final_message:
            raise bad_request(
                "add_generation_prompt starts a new message and continue_final_message goes on with the last; set only one",
                "continue_final_message",
            )
        messages, images, kinds = await self._images.taken(
            conversation.messages, conversation.mm_processor_kwargs, counted=conversation.is_converted
        )
        work = self._encoder.encode(
            self._job(conversation, messages, kinds), images, add_special_tokens=conversation.add_special_tokens
        )
        text, token_ids = await self._work.run(work, num_bytes=conversation.num_bytes, threads=self._threads)
        return Rendered(text, token_ids, messages, images)

    def _job(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
        hints = {"reasoning_effort": conversation.reasoning_effort, "enable_thinking": conversation.enable_thinking}
        leaves_out = conversation.tool_choice == "none" and self._options.exclude_tools_when_tool_choice_none
        return {
            "messages": list(messages),
            "image_texts": self._engine.input_processor.media.placeholders(kinds),
            "interleave_images": self._engine.config.multimodal.interleave_mm_strings,
            "tools": None if not conversation.tools or leaves_out else list(conversation.tools),
            "documents": list(conversation.documents) if conversation.documents else None,
            "chat_template": conversation.chat_template or self._engine.chat_template,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            "content_format": self._options.chat_template_content_format,
            "default_kwargs": self._options.default_chat_template_kwargs or {},
            "hints": {name: value for name, value in hints.items() if value is not None},
            "kwargs": dict(conversation.chat_template_kwargs or {}),
        }

    async def prepare(self, conversation: Conversation) -> PreparedChat:
        """Render, tokenize and check a conversation. Raises ApiError or InvalidRequestError."""
        self._engine.input_processor.check_generates()
        check = check_tools if self._encoder is None else self.speech.check
        work = in_one_piece(check, conversation.tools, conversation.tool_choice)
        tools, choice = await self._work.unless_small(work, num_bytes=conversation.num_bytes)
        rendered = await self.render(conversation)
        params, reader = self.speech.prepared(
            conversation.params,
            tools,
            choice,
            rendered.text,
            parallel=conversation.parallel_tool_calls,
            include_reasoning=conversation.include_reasoning,
            request_type=conversation.request_type,
        )
        max_model_len = self._engine.max_model_len
        search = conversation.beam_search
        ids = truncated(
            rendered.token_ids,
            conversation.truncate_prompt_tokens,
            conversation.truncation_side,
            max_model_len,
            conversation.asked_tokens,
        )
        if rendered.images and len(ids) < len(rendered.token_ids):
            raise bad_request(
                f"truncate_prompt_tokens is {conversation.truncate_prompt_tokens}, but the conversation has {len(rendered.token_ids)} "
                "tokens, and those with images are never cut; shorten it",
                "truncate_prompt_tokens",
            )
        check_length(len(ids), max_model_len, "messages")
        if search is not None:
            assert params.structured_outputs is None, "a search follows no grammar"
            search = dataclasses.replace(search, skip_special_tokens=params.skip_special_tokens)
        options = dataclasses.replace(
            conversation.options, adapter=conversation.adapter, queue_timeout_seconds=self._queue_timeout_seconds
        )
        try:
            request = await self._engine.prepare(
                rendered._replace(token_ids=ids).prompt, params if search is None else search, conversation.request_id, options
            )
        except InvalidRequestError as error:
            if error.param == "logprobs":
                raise bad_request(f"top_{error}", "top_logprobs") from None  # the same name in all these APIs
            if error.param == "structured_outputs":
                raise constraint_error(error, "tools" if choice.is_forced else conversation.constraint_param) from None
            raise
        conversation.messages = rendered.messages  # images need not stay in memory while the answer is streamed
        self.note_request(request)
        return PreparedChat(conversation, request, Usage(len(ids), multimodal_tokens=multimodal_tokens(request)), reader)

    async def stream(self, chat: PreparedChat) -> AsyncGenerator[list[ChatDelta], None]:
        """Stream the answer; with output_kind FINAL_ONLY yield it once. Closing the generator aborts the request.

        Raises ApiError, EngineError or EngineDeadError.
        """
        async with contextlib.aclosing(self._engine.stream(chat.request)) as outputs:
            async for output in outputs:
                yield chat.deltas_of(output)

    async def complete(self, chat: PreparedChat) -> list[ChatDelta]:
        """Return the complete answers, in order. Raises ApiError, EngineError or EngineDeadError."""
        answers: dict[int, ChatDelta] = {}
        async with contextlib.aclosing(self.stream(chat)) as updates:
            async for deltas in updates:
                join_into(answers, deltas)
        return [answers[index] for index in sorted(answers)]
