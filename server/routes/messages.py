"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.chat_deltas import ChatDelta
from server.chat_service import Conversation, PreparedChat
from server.context import ServerContext, context_of, request_id_of
from server.converted import conversation_of, renamed_params
from server.deadline import Deadline
from server.early_errors import after_early_errors
from server.errors import ApiError
from server.messages.errors import as_anthropic_error
from server.messages.output import Event, MessageWriter, stop_reason_of, usage_object
from server.messages.to_chat import chat_fields, enable_thinking, prompt_fields
from server.named_events import encoded, named_events
from server.openapi import json_body
from server.protocol.anthropic import CountTokensRequest, MessagesRequest, Prompt
from server.shaped_route import ShapedRoute
from server.sse import EventStream, unless_disconnected
from server.work import in_one_piece

router = APIRouter(tags=["Anthropic"], route_class=ShapedRoute)
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}


@router.post("/v1/messages", openapi_extra=json_body(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, MessagesRequest)
    limit = Deadline(context.time_limit(body.timeout))
    chat = await prepared(request, body, limit)
    body.messages.clear()  # they may have images, and the answer may take long
    reply = MessageReply(body, chat, context, limit)
    if body.stream:
        return EventStream(
            reply.stream(),
            keep_alive_seconds=context.options.replies.sse_keep_alive_interval,
            error_event=reply.error_event,
        )
    whole = await unless_disconnected(request.receive, reply.whole())
    return Response(encoded(whole), media_type="application/json")


async def prepared(request: Request, body: MessagesRequest, limit: Deadline) -> PreparedChat:
    """The conversation of a body, ready for the engine. Raises ApiError, InvalidRequestError or ValidationError."""
    context = context_of(request)
    async with limit:
        adapter = await context.adapter_of(body.model)
    with renamed_params(RENAMED):
        request_id = f"msg_{request_id_of(request, body.request_id)}"
        fields = partial(chat_fields, can_limit_thinking=context.engine.input_processor.can_limit_thinking)
        conversation = await _conversation(request, fields, body, request_id)
        conversation.adapter = adapter
        async with limit:
            return await context.chat.prepare(conversation)


@router.post("/v1/messages/count_tokens", openapi_extra=json_body(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has, without answering it."""
    context = context_of(request)
    body = await read_body(request, CountTokensRequest)
    await context.adapter_of(body.model)
    with renamed_params(RENAMED):
        conversation = await _conversation(request, prompt_fields, body, "count_tokens")
        ids = (await context.chat.render(conversation)).token_ids
    return Response(encoded({"input_tokens": len(ids)}), media_type="application/json")


async def _conversation(
    request: Request, fields: Callable[[Any], dict[str, Any]], body: Prompt, request_id: str
) -> Conversation:
    """The conversation of a body. Raises ApiError, InvalidRequestError or ValidationError."""

    def convert() -> Conversation:
        conversation = conversation_of(fields(body), context_of(request), request_id)
        conversation.enable_thinking = enable_thinking(body)
        return conversation

    return await context_of(request).work.unless_small(in_one_piece(convert))


class MessageReply:
    """Writes the reply to one request, whole or as events."""

    def __init__(self, body: MessagesRequest, chat: PreparedChat, context: ServerContext, limit: Deadline):
        self._body = body
        self._chat = chat
        self._context = context
        self._limit = limit
        omit = body.thinking is not None and body.thinking.display == "omitted"
        self._writer = MessageWriter(
            {
                "id": chat.conversation.request_id,
                "type": "message",
                "role": "assistant",
                "model": context.name_for(chat.request),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage(),
            },
            omit_thinking=omit,
        )

    async def whole(self) -> dict[str, Any]:
        """The reply as one object. Raises ApiError, EngineError or EngineDeadError."""
        async with contextlib.aclosing(self._updates()) as updates:
            async for deltas in updates:
                self._events_of(deltas)
        return self._writer.message

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply as events. Raises AnthropicError."""
        try:
            async with contextlib.aclosing(after_early_errors(self._updates())) as updates:
                async for deltas in updates:
                    events = self._writer.start() if deltas is None else self._events_of(deltas)
                    if events:
                        yield named_events(events)
        except Exception as error:
            raise as_anthropic_error(error) from error

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return b"event: error\ndata: %b\n\n" % error.body()

    async def _updates(self) -> AsyncGenerator[list[ChatDelta], None]:
        with self._context.running():
            async with contextlib.aclosing(self._limit.applied(self._context.chat.stream(self._chat))) as updates:
                async for deltas in updates:
                    yield deltas

    def _events_of(self, deltas: list[ChatDelta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if delta.reasoning:
                events += self._writer.reasoning(delta.reasoning)
            if delta.content:
                events += self._writer.text(delta.content)
            for call in delta.tool_calls:
                if call.id is not None:
                    events += self._writer.call(call.id, call.name or "")
                if call.arguments:
                    events += self._writer.arguments(call.arguments)
            if delta.finish_reason is not None:
                filled = self._chat.usage.completion_tokens < self._body.max_tokens
                reason, sequence = stop_reason_of(delta.finish_reason, delta.stop_reason, filled_context=filled)
                events += self._writer.finish(
                    stop_reason=reason, stop_sequence=sequence, usage=self._usage(), extra=self._chat.kv_transfer
                )
        return events

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage
        return usage_object(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
