"""POST /v1/chat/completions."""

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from server.beam_search import beam_search_params
from server.body import read_body
from server.chat_deltas import ChatDelta
from server.chat_service import ChatService, Conversation, PreparedChat
from server.chunk_writer import ChunkWriter
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.dialects import AskedChoice, check_tools
from server.errors import bad_request
from server.logprobs import LogprobWriter
from server.openapi import json_body
from server.options import ChatOptions
from server.prompts import check_max_tokens
from server.protocol.chat import AllowedToolChoice, ChatCompletionRequest, Message, NamedToolChoice
from server.protocol.common import engine_options
from server.sampling import check_xargs, constraint_param, sampling_params
from server.sse import EventStream, unless_disconnected
from server.usage import per_request_metrics, timings
from server.work import in_one_piece

router = APIRouter(tags=["OpenAI"])
_json = msgspec.json.encode

MAX_TEMPLATE_KWARGS_BYTES = 4096
MAX_TEMPLATE_CHARACTERS = 1 << 17
MEDIA = ("image_url", "input_image", "video_url", "audio_url", "input_audio")
"""Types of parts that are images, videos or audio."""
_OF_MEDIA = {"image_url", "video_url", "audio_url", "input_audio", "detail", "file_id", "uuid"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of parts that are text, and the field that has it."""


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        adapter = await context.adapter_of(body.model)
        work = in_one_piece(to_conversation, body, context, request_id_of(request, body.request_id))
        conversation = await context.work.unless_small(work)
        conversation.adapter = adapter
        chat = await context.chat.prepare(conversation)
    body.messages.clear()  # they may have images, and the answer may take long
    reply = ChatReply(body, chat, context)
    if body.stream:
        return EventStream(
            limit.applied(reply.stream(context.chat)), keep_alive_seconds=context.options.replies.sse_keep_alive_interval
        )
    async with limit:
        with context.running():
            whole = await unless_disconnected(request.receive, reply.whole(context.chat))
    return Response(_json(whole), media_type="application/json")


def to_conversation(body: ChatCompletionRequest, context: ServerContext, request_id: str) -> Conversation:
    """Convert the body to a Conversation. Raises ApiError or InvalidRequestError."""
    _check(body, context)
    top = None
    if body.logprobs and not body.logprob_token_ids:
        top = 0 if body.top_logprobs is None else body.top_logprobs
    named = next((name for name in ("max_completion_tokens", "max_tokens") if getattr(body, name) is not None), None)
    asked = None if named is None else getattr(body, named)
    check_max_tokens(asked, context.engine.max_model_len, named or "max_tokens")
    max_tokens = context.default_max_tokens if asked is None else asked
    limits, search = context.options.limits, None
    if body.use_beam_search:
        search = beam_search_params(
            body,
            limits,
            max_tokens=context.engine.max_model_len if max_tokens is None else max_tokens,
            logprobs=top,
            max_logprobs=context.engine.config.model.max_logprobs,
        )
        params = SamplingParams(
            n=search.n, skip_special_tokens=search.skip_special_tokens, output_kind=RequestOutputKind.FINAL_ONLY
        )
    else:
        params = sampling_params(body, context.defaults, limits, max_tokens=max_tokens, logprobs=top)
        check_xargs(body, params, context.engine)
    add_generation_prompt = body.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not body.continue_final_message
    return Conversation(
        messages=[to_message(message, place) for place, message in enumerate(body.messages)],
        params=params,
        beam_search=search,
        request_id=f"chatcmpl-{request_id}",
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        documents=body.documents,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        mm_processor_kwargs=body.mm_processor_kwargs,
        constraint_param=constraint_param(body),
        asked_tokens=asked,
        options=engine_options(body),
    )


def to_message(message: Message, place: int) -> dict[str, Any]:
    """The message at a place in the form that templates read, with its images. Raises ApiError."""
    found: dict[str, Any] = {"role": message.role, "content": _content(message, f"messages[{place}].content")}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request("messages has a tool message without tool_call_id", "messages")
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        found["reasoning"] = found["reasoning_content"] = reasoning
    return found


def _content(message: Message, where: str) -> Any:
    content = message.content
    if content is None:
        return message.refusal or ("" if not message.tool_calls else None)
    if isinstance(content, str):
        return content
    parts = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif (kind := part.kind) in MEDIA:
            parts.append({"type": kind, **part.model_dump(include=_OF_MEDIA, exclude_none=True)})
        elif kind not in _TEXTS:
            raise bad_request(
                f"{where}[{place}] is a part of type {kind[:40]!r}; only text and, for models that take them, images (image_url), "
                "videos (video_url) and audio (input_audio, audio_url) are supported",
                "messages",
            )
        elif (text := getattr(part, _TEXTS[kind])) is None:
            raise bad_request(f"{where}[{place}] is a text part without text", "messages")
        else:
            parts.append({"type": "text", "text": text})
    return parts


def _check(body: ChatCompletionRequest, context: ServerContext) -> None:
    for name, only in ChatCompletionRequest.HARMLESS.items():
        if getattr(body, name) not in (None, only):
            raise bad_request(f"{name} must be {only!r}: nothing else is supported", name, "unsupported_parameter")
    if body.top_logprobs is not None and body.top_logprobs != 0 and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < -1:
        raise bad_request(f"top_logprobs is {body.top_logprobs}, must be at least 0, or -1 for all", "top_logprobs")
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise bad_request(f"max_completion_tokens is {body.max_completion_tokens}, must be at least 1", "max_completion_tokens")
    if body.logprob_token_ids and not body.logprobs:
        raise bad_request("logprob_token_ids needs logprobs to be true", "logprob_token_ids")
    check_template(body.chat_template, body.chat_template_kwargs, context.options.chat)


def check_template(template: str | None, kwargs: Mapping[str, Any] | None, options: ChatOptions) -> None:
    """Raise ApiError for an untrusted template or template arguments that are too large."""
    if kwargs and len(_json(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise bad_request(f"chat_template_kwargs is larger than {MAX_TEMPLATE_KWARGS_BYTES} bytes", "chat_template_kwargs")
    if template is not None and not options.trust_request_chat_template:
        raise bad_request(
            "chat_template is refused; this server renders its own (start it with --trust-request-chat-template to change that)",
            "chat_template",
        )
    if len(template or "") > MAX_TEMPLATE_CHARACTERS:
        raise bad_request(f"chat_template has more than {MAX_TEMPLATE_CHARACTERS} characters", "chat_template")


def _tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """The tools that the model may know: those that a choice among some of them allows. Raises ApiError or InvalidRequestError."""
    if body.tools is None:
        return None
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if not isinstance(body.tool_choice, AllowedToolChoice):
        return tools
    check_tools(tools, None)  # all of them, as the client counts them: later only those that are left are checked
    allowed = {tool.function.name for tool in body.tool_choice.allowed_tools.tools}
    if missing := allowed - {tool["function"]["name"] for tool in tools}:
        raise bad_request(f"tool_choice names the function {min(missing)[:64]!r}, which tools lacks", "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in allowed]


def _tool_choice(body: ChatCompletionRequest) -> AskedChoice | None:
    choice = body.tool_choice
    if isinstance(choice, AllowedToolChoice):
        return choice.allowed_tools.mode
    return choice.model_dump() if isinstance(choice, NamedToolChoice) else choice


class ChatReply:
    """Writes the reply to one request, whole or in chunks."""

    def __init__(self, body: ChatCompletionRequest, chat: PreparedChat, context: ServerContext):
        self._body = body
        self._chat = chat
        self._context = context
        replies = context.options.replies
        self._logprobs = LogprobWriter(context.engine.input_processor.tokenizer, as_ids=context.writes_ids(body))
        self._num_top = -1 if body.logprob_token_ids else body.top_logprobs or 0
        self._created = int(time.time())
        self._tells_cached = replies.enable_prompt_tokens_details
        self._has_metrics = replies.enable_per_request_metrics
        self._has_timings = body.include_timings or self._has_metrics
        self._echoed = self._last_text() if body.echo else ""

    def _last_text(self) -> str:
        """The last message's text if the answer continues it, or is of the same role."""
        conversation, last = self._chat.conversation, self._chat.conversation.messages[-1]
        if conversation.add_generation_prompt and last["role"] != self._context.options.chat.response_role:
            return ""
        content = last.get("content") or ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    # Whole reply

    async def whole(self, service: ChatService) -> dict[str, Any]:
        """Return the reply as one object."""
        return self.of_answers(await service.complete(self._chat))

    def of_answers(self, answers: Sequence[ChatDelta]) -> dict[str, Any]:
        """The reply with these complete answers."""
        chat = self._chat
        reply: dict[str, Any] = {
            "id": chat.conversation.request_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._context.name_for(chat.request),
            "choices": [self._choice(answer) for answer in answers],
            "usage": self._usage(),
            "system_fingerprint": self._context.fingerprint,
            "prompt_logprobs": None if chat.prompt_logprobs is None else self._logprobs.prompt(chat.prompt_logprobs),
        }
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = chat.prompt_token_ids
        return {**reply, **self._times(), **chat.kv_transfer}

    def _times(self) -> dict[str, Any]:
        chat, found = self._chat, {}
        if self._has_timings:
            found["timings"] = timings(chat.metrics, chat.usage.completion_tokens)
        if self._has_metrics:
            is_one = chat.conversation.params.n == 1
            found["metrics"] = per_request_metrics(chat.metrics, chat.usage.completion_tokens) if is_one else None
        return found

    def _choice(self, answer: ChatDelta) -> dict[str, Any]:
        content = self._echoed + answer.content
        message: dict[str, Any] = {
            "role": self._context.options.chat.response_role,
            "content": content if content or not answer.tool_calls else None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning"] = message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprob_object(answer),
            "finish_reason": self._finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _finish_reason(self, answer: ChatDelta) -> str | None:
        """The finish reason as in OpenAI's API: a call of the function that the request names ends with "stop".

        Other calls end with "tool_calls".
        """
        is_named = isinstance(self._body.tool_choice, NamedToolChoice)
        return "stop" if is_named and answer.finish_reason == "tool_calls" else answer.finish_reason

    def _logprob_object(self, answer: ChatDelta) -> dict[str, Any] | None:
        if not self._body.logprobs or answer.logprobs is None:
            return None
        return {"content": self._logprobs.chat(answer.token_ids, answer.logprobs, self._num_top), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        return self._chat.usage.as_dict(tells_cached=self._tells_cached)

    # Streamed reply

    async def stream(self, service: ChatService) -> AsyncGenerator[bytes, None]:
        """Yield the reply as events; events that are ready together are sent together."""
        chunks = ChunkWriter(
            "chat.completion.chunk",
            b',"delta":{"content":',
            b"}",
            self._body.stream_options,
            request_id=self._chat.conversation.request_id,
            created=self._created,
            model=self._context.name_for(self._chat.request),
            context=self._context,
        )
        first = b"".join(self._first_chunks(chunks, self._usage() if chunks.continuous_usage else None))
        with self._context.running():
            async with contextlib.aclosing(service.stream(self._chat)) as updates:
                async for deltas in updates:
                    parts = [first] if first else []
                    first = b""
                    for delta in deltas:
                        usage = self._usage() if chunks.continuous_usage else None
                        extra = self._chat.kv_transfer if delta is deltas[-1] else {}
                        parts += self._chunks(delta, chunks, usage, extra)
                    if parts:
                        yield b"".join(parts)
        yield chunks.end(self._usage(), self._times())

    def _first_chunks(self, chunks: ChunkWriter, usage: Mapping[str, Any] | None) -> Iterator[bytes]:
        """The role chunk of each answer; the very first includes information on the prompt."""
        role = {"role": self._context.options.chat.response_role, "content": self._echoed}
        extra = {"prompt_token_ids": self._chat.prompt_token_ids} if self._body.return_token_ids else {}
        for index in range(self._chat.conversation.params.n):
            choice = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            yield chunks.chunk(choice, usage, extra)
            extra = {}

    def _chunks(
        self, delta: ChatDelta, chunks: ChunkWriter, usage: Mapping[str, Any] | None, extra: Mapping[str, Any]
    ) -> list[bytes]:
        """The chunks of a delta; `extra` is added to that with the finish reason."""
        is_plain = not (delta.logprobs or delta.reasoning or delta.tool_calls or self._body.return_token_ids or usage)
        parts = []
        if is_plain:
            if delta.content:
                parts.append(chunks.text(delta.index, delta.content))
        elif delta.content or delta.reasoning or delta.tool_calls or delta.token_ids:
            parts.append(chunks.chunk(self._rich(delta), usage))
        if delta.finish_reason is not None:
            end = {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": self._finish_reason(delta),
                "stop_reason": delta.stop_reason,
            }
            parts.append(chunks.chunk(end, usage, extra))
        return parts

    def choice_of(self, delta: ChatDelta) -> dict[str, Any]:
        """A chunk's choice with all that a delta has."""
        finish = {"finish_reason": self._finish_reason(delta), "stop_reason": delta.stop_reason}
        return {**self._rich(delta), **finish}

    def _rich(self, delta: ChatDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning"] = fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.id is None
                else {
                    "index": call.index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in delta.tool_calls
            ]
        choice = {"index": delta.index, "delta": fields, "logprobs": self._logprob_object(delta), "finish_reason": None}
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
