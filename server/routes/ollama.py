"""ollama's API for answers: /api/chat and /api/generate."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import clock
from jaxllm.outputs import RequestMetrics
from jaxllm.text.input_processor import ParentRequest
from server.body import read_body
from server.chat_deltas import ChatDelta, joined
from server.chat_service import Conversation
from server.context import ServerContext, context_of, request_id_of
from server.converted import conversation_of, renamed_params
from server.deadline import Deadline
from server.endings import end_of
from server.errors import as_api_error, bad_request
from server.ollama.about import time_text
from server.ollama.errors import as_ollama_error
from server.ollama.names import adapter_of
from server.ollama.to_chat import chat_fields, sampling_fields
from server.openapi import json_body
from server.protocol.completions import CompletionRequest
from server.protocol.ollama import OllamaChatRequest, OllamaGenerateRequest
from server.routes import completions
from server.shaped_route import ShapedRoute
from server.sse import EventStream, unless_disconnected
from server.usage import Usage
from server.work import in_one_piece

router = APIRouter(tags=["ollama"], route_class=ShapedRoute)
_json = msgspec.json.encode
RENAMED = {
    "max_completion_tokens": "options",
    "max_tokens": "options",
    "repetition_penalty": "options",
    "response_format": "format",
    "reasoning_effort": "think",
}
Pieces = AsyncGenerator[list[ChatDelta], None]


class _Lines(EventStream):
    media_type = "application/x-ndjson"


@router.post("/api/chat", openapi_extra=json_body(OllamaChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, OllamaChatRequest)
    adapter = await adapter_of(body.model, context)
    if not body.messages:
        return _nothing({"message": {"role": "assistant", "content": ""}}, adapter or context.model_name)
    return await _answered(request, body, adapter, _message)


@router.post("/api/generate", openapi_extra=json_body(OllamaGenerateRequest))
async def generate(request: Request) -> Response:
    """Answer a prompt, or write on from it (raw)."""
    context = context_of(request)
    body = await read_body(request, OllamaGenerateRequest)
    adapter = await adapter_of(body.model, context)
    if not body.prompt:
        return _nothing({"response": ""}, adapter or context.model_name)
    return await _answered(request, body, adapter, _response)


def _nothing(answer: Mapping[str, Any], model: str) -> Response:
    """The reply to a request that only loads the model."""
    head = {"model": model, "created_at": time_text(time.time())}
    return Response(_json({**head, **answer, "done": True, "done_reason": "load"}), media_type="application/json")


async def _answered(
    request: Request,
    body: OllamaChatRequest | OllamaGenerateRequest,
    adapter: str | None,
    shown: Callable[[ChatDelta], dict[str, Any]],
) -> Response:
    context = context_of(request)
    limit = Deadline(context.time_limit(None))
    request_id = f"ollama-{request_id_of(request, None)}"
    with renamed_params(RENAMED):
        async with limit:
            if isinstance(body, OllamaGenerateRequest) and body.raw:
                work: _Chat | _Raw = await _Raw.prepared(body, context, request_id, adapter)
            else:
                work = await _Chat.prepared(body, context, request_id, adapter)
    reply = _Reply(work, context, shown)
    if body.stream is not False:
        return _Lines(limit.applied(reply.lines()), error_event=lambda error: as_ollama_error(error).body() + b"\n")
    async with limit:
        whole = await unless_disconnected(request.receive, reply.whole())
    return Response(_json(whole), media_type="application/json")


class _Chat:
    """An answer to a conversation."""

    def __init__(self, chat: Any, context: ServerContext):
        self._chat, self._context = chat, context
        self.request: ParentRequest = chat.request
        self.usage: Usage = chat.usage

    @classmethod
    async def prepared(
        cls,
        body: OllamaChatRequest | OllamaGenerateRequest,
        context: ServerContext,
        request_id: str,
        adapter: str | None,
    ) -> "_Chat":
        """Raises ApiError, InvalidRequestError or ValidationError."""

        def convert() -> Conversation:
            fields = chat_fields(body, context.engine.max_model_len, context.chat_defaults)
            return conversation_of(fields, context, request_id)

        conversation = await context.work.unless_small(in_one_piece(convert))
        conversation.adapter = adapter
        if body.think is not None:
            conversation.enable_thinking = bool(body.think)
            conversation.include_reasoning = bool(body.think)
        return cls(await context.chat.prepare(conversation), context)

    @property
    def metrics(self) -> RequestMetrics | None:
        """Timings, as far as available."""
        return self._chat.metrics

    def deltas(self) -> Pieces:
        """Stream the answer."""
        return self._context.chat.stream(self._chat)


class _Raw:
    """A text continuation of a prompt."""

    def __init__(self, request: ParentRequest, context: ServerContext):
        self.request, self._context = request, context
        self.usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self.metrics: RequestMetrics | None = None

    @classmethod
    async def prepared(
        cls, body: OllamaGenerateRequest, context: ServerContext, request_id: str, adapter: str | None
    ) -> "_Raw":
        """Raises ApiError or InvalidRequestError."""
        if body.images:
            raise bad_request("images need the chat template; leave out raw", "images")
        longest = context.engine.max_model_len
        sampling = sampling_fields(body, "max_tokens", longest, context.chat_defaults)
        fields = {"max_tokens": longest, **sampling, "prompt": body.prompt}
        try:
            wanted = CompletionRequest.model_validate(fields)
        except ValidationError as error:
            raise as_api_error(error) from None
        return cls((await completions.prepare(wanted, context, request_id, adapter)).requests[0], context)

    async def deltas(self) -> Pieces:
        """Stream the text."""
        async with contextlib.aclosing(self._context.engine.stream(self.request)) as outputs:
            async for output in outputs:
                self.metrics = output.metrics
                (answer,) = output.outputs
                self.usage.completion_tokens += len(answer.token_ids)
                yield [ChatDelta(0, answer.text, finish_reason=end_of(answer))]


class _Reply:
    """Writes one reply, whole or line by line."""

    def __init__(self, work: _Chat | _Raw, context: ServerContext, shown: Callable[[ChatDelta], dict[str, Any]]):
        self._work, self._context, self._shown = work, context, shown
        self._began = clock.now()

    async def whole(self) -> dict[str, Any]:
        """Return the reply as one object."""
        answer, reason = ChatDelta(0), "stop"
        with self._context.running():
            async with contextlib.aclosing(self._work.deltas()) as updates:
                async for deltas in updates:
                    for delta in deltas:
                        answer = joined(answer, delta)
                        reason = delta.finish_reason or reason
        return {**self._head(), **self._shown(answer), **self._end(reason)}

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the reply as JSON objects, one per line; tool calls come whole, after the answer. Raises OllamaError."""
        calls, reason = ChatDelta(0), "stop"
        try:
            with self._context.running():
                async with contextlib.aclosing(self._work.deltas()) as updates:
                    async for deltas in updates:
                        for delta in deltas:
                            reason = delta.finish_reason or reason
                            calls = joined(calls, ChatDelta(0, tool_calls=delta.tool_calls))
                            if delta.content or delta.reasoning:
                                yield self._line(ChatDelta(0, delta.content, delta.reasoning))
        except Exception as error:
            raise as_ollama_error(error) from error
        if calls.tool_calls:
            yield self._line(calls)
        yield _json({**self._head(), **self._shown(ChatDelta(0)), **self._end(reason)}) + b"\n"

    def _line(self, delta: ChatDelta) -> bytes:
        return _json({**self._head(), **self._shown(delta), "done": False}) + b"\n"

    def _head(self) -> dict[str, Any]:
        return {"model": self._context.name_for(self._work.request), "created_at": time_text(time.time())}

    def _end(self, reason: str) -> dict[str, Any]:
        usage, metrics = self._work.usage, self._work.metrics
        first = None if metrics is None else metrics.first_token_time
        now = clock.now()
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self._began),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds((first or now) - self._began),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(now - (first or now)),
        }


def _message(delta: ChatDelta) -> dict[str, Any]:
    """A delta in /api/chat's format."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.content}
    if delta.reasoning:
        message["thinking"] = delta.reasoning
    if delta.tool_calls:
        calls = [{"name": call.name, "arguments": _arguments(call.arguments)} for call in delta.tool_calls]
        message["tool_calls"] = [{"function": call} for call in calls]
    return {"message": message}


def _response(delta: ChatDelta) -> dict[str, Any]:
    """A delta in /api/generate's format."""
    return {"response": delta.content} | ({"thinking": delta.reasoning} if delta.reasoning else {})


def _arguments(text: str) -> Any:
    """The arguments of a call as an object; empty for a truncated call."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
