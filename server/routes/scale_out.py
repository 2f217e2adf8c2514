"""With --enable-scale-out: POST /inference/v1/generate and abort_requests, …/render and …/derender."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.errors import bad_request
from server.named_events import encoded
from server.openapi import json_body
from server.owner import owner_of
from server.protocol.anthropic import MessagesRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.responses import ResponsesRequest
from server.protocol.scale_out import (
    AbortRequests,
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateRequest,
    TokensReply,
)
from server.routes import completions
from server.routes.chat import to_conversation
from server.routes.messages import prepared as prepared_message
from server.scale_out.chunks import chat_chunk, completion_chunk
from server.scale_out.completions import derendered
from server.scale_out.derender import NO_REQUEST, TokenAnswer, derendered_chat
from server.scale_out.generate import GenerateReply, prepare
from server.scale_out.render import generate_body, refuse_search
from server.sse import EventStream, unless_disconnected
from server.usage import Usage
from server.work import in_one_piece

router = APIRouter(tags=["Scale-out"])


@router.post("/inference/v1/generate", openapi_extra=json_body(GenerateRequest))
async def generate(request: Request) -> Response:
    """Go on from token ids, and answer with token ids."""
    context = context_of(request)
    body = await read_body(request, GenerateRequest)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        adapter = await context.adapter_of(body.model)
        work = await prepare(body, context, request_id_of(request, body.request_id), adapter)
    reply = GenerateReply(body, work, context)
    if body.stream:
        return EventStream(limit.applied(reply.stream()), keep_alive_seconds=context.options.replies.sse_keep_alive_interval)
    async with limit:
        with context.running():
            return _json(await unless_disconnected(request.receive, reply.whole()))


@router.post("/inference/v1/abort_requests", openapi_extra=json_body(AbortRequests))
async def abort_requests(request: Request) -> Response:
    """End requests of this process by the ids in their replies. Unknown ids are ignored."""
    body = await read_body(request, AbortRequests)
    await context_of(request).engine.abort(body.request_ids)
    return Response()


@router.post("/v1/chat/completions/render", openapi_extra=json_body(ChatCompletionRequest))
async def render_chat(request: Request) -> Response:
    """The body of generate for a chat request."""
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest)
    refuse_search(body)
    work = in_one_piece(to_conversation, body, context, request_id_of(request, body.request_id))
    conversation = await context.work.unless_small(work)
    conversation.adapter = await context.adapter_of(body.model)
    chat = await context.chat.prepare(conversation)
    return _json(generate_body(chat.request, context.name_for(chat.request), body, conversation))


@router.post("/v1/completions/render", openapi_extra=json_body(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """The bodies of generate for the prompts of a completion request."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    refuse_search(body)
    adapter = await context.adapter_of(body.model)
    work = await completions.prepare(body, context, f"cmpl-{request_id_of(request, body.request_id)}", adapter)
    return _json([generate_body(each, context.name_for(each), body) for each in work.requests])


@router.post("/v1/messages/render", openapi_extra=json_body(MessagesRequest))
async def render_messages(request: Request) -> Response:
    """The body of generate for a request of Anthropic's API."""
    context = context_of(request)
    body = await read_body(request, MessagesRequest)
    chat = await prepared_message(request, body, Deadline(context.time_limit(body.timeout)))
    return _json(generate_body(chat.request, context.name_for(chat.request), body, chat.conversation))


@router.post("/v1/responses/render", openapi_extra=json_body(ResponsesRequest))
async def render_response(request: Request) -> Response:
    """The body of generate for a request of the Responses API."""
    context = context_of(request)
    body = await read_body(request, ResponsesRequest)
    limit = Deadline(context.time_limit(body.timeout))
    service = request.app.state.responses
    run = await service.prepare(body, owner_of(request), request_id_of(request, body.request_id), limit)
    return _json(generate_body(run.chat.request, context.name_for(run.chat.request), body, run.chat.conversation))


@router.post("/v1/chat/completions/derender", openapi_extra=json_body(DerenderChatRequest))
async def derender_chat(request: Request) -> Response:
    """The chat completion of a reply of generate, or with `stream` a chunk of one."""
    context = context_of(request)
    body = await read_body(request, DerenderChatRequest)
    await context.adapter_of(body.model)
    reply = _reply_of(body)
    prompt_ids = _checked_prompt(body.prompt_token_ids or reply.prompt_token_ids or [], context)
    if context.chat.speech.reads_answers:
        for name in ("chat_request", *(["prompt_token_ids"] if body.stream else [])):
            if getattr(body, name) is None:
                raise bad_request(f"{name} is missing: reasoning and tool calls cannot be told from text without it", name)
    num_prompt = len(prompt_ids) if body.prompt_tokens is None else body.prompt_tokens
    if body.stream:
        choices, state = await context.work.run(in_one_piece(chat_chunk, body, context, reply, prompt_ids))
        return _chunk("chat.completion.chunk", body.model, context, reply, choices, state, num_prompt)
    given = dict(NO_REQUEST if body.chat_request is None else body.chat_request)
    if body.chat_request is None and any(choice.logprobs for choice in reply.choices):
        given |= {"logprobs": True, "top_logprobs": -1}
    found = await context.work.run(in_one_piece(_derendered_chat, context, given, reply, prompt_ids))
    _tell(found, body.model, reply, num_prompt)
    found["prompt_logprobs"] = reply.prompt_logprobs
    return _json(found)


@router.post("/v1/completions/derender", openapi_extra=json_body(DerenderCompletionRequest))
async def derender_completion(request: Request) -> Response:
    """The completion of replies of generate, or with `stream` a chunk of one."""
    context = context_of(request)
    body = await read_body(request, DerenderCompletionRequest)
    await context.adapter_of(body.model)
    if body.stream:
        reply = _reply_of(body)
        own: Any = body.prompt_token_ids or reply.prompt_token_ids or []
        if own and not isinstance(own[0], int):
            raise bad_request(
                "prompt_token_ids must be the ids of one prompt: generate_chunk belongs to one", "prompt_token_ids"
            )
        prompt_ids, counts = _checked_prompt(own, context), body.prompt_tokens
        if isinstance(counts, list):
            raise bad_request("prompt_tokens must be a number: generate_chunk belongs to one prompt", "prompt_tokens")
        choices, state = await context.work.run(in_one_piece(completion_chunk, body, context, reply, prompt_ids))
        num_prompt = len(prompt_ids) if counts is None else counts
        return _chunk("text_completion", body.model, context, reply, choices, state, num_prompt)
    replies = body.generate_responses
    if not replies:
        raise bad_request("generate_responses is missing or empty; give a reply for each prompt", "generate_responses")
    ids: Any = body.prompt_token_ids or [None] * len(replies)
    counts_of: Any = [None] * len(replies) if body.prompt_tokens is None else body.prompt_tokens
    for name, values in (("prompt_token_ids", ids), ("prompt_tokens", counts_of)):
        if (
            not isinstance(values, list)
            or len(values) != len(replies)
            or any(name[-3:] == "ids" and isinstance(v, int) for v in values)
        ):
            raise bad_request(f"{name} must have an entry for each of the {len(replies)} generate_responses", name)
    prompts = [_checked_prompt(own or reply.prompt_token_ids or [], context) for own, reply in zip(ids, replies, strict=True)]
    found = await context.work.run(in_one_piece(derendered, context, body.completion_request, replies, prompts))
    num_prompt = sum(len(own) if count is None else count for own, count in zip(prompts, counts_of, strict=True))
    _tell(found, body.model, replies[0] if len(replies) == 1 else TokensReply(choices=[]), num_prompt)
    return _json(found)


def _derendered_chat(
    context: ServerContext, given: dict[str, Any], reply: TokensReply, prompt_ids: list[int]
) -> dict[str, Any]:
    answers = [TokenAnswer.of(choice, context) for choice in reply.choices]
    return derendered_chat(context, given, answers, reply.request_id or "", prompt_ids)


def _reply_of(body: DerenderChatRequest | DerenderCompletionRequest) -> TokensReply:
    """The reply or the chunk. Raises ApiError if there is none."""
    name = "generate_chunk" if body.stream else "generate_response"
    reply = getattr(body, name, None)
    if reply is None:
        raise bad_request(f"{name} is missing; with stream true it is generate_chunk, else generate_response", name)
    return reply


def _checked_prompt(ids: list[int], context: ServerContext) -> list[int]:
    """The ids of a prompt. Raises ApiError."""
    most, size = context.engine.max_model_len, len(context.tokenizer)
    if len(ids) > most or (ids and max(ids) >= size):
        raise bad_request(f"prompt_token_ids may have {most} ids, from 0 to {size - 1}; it has {len(ids)}", "prompt_token_ids")
    return ids


def _tell(found: dict[str, Any], model: str | None, reply: TokensReply, num_prompt: int) -> None:
    """Put into a reply what generate has told."""
    usage = found["usage"]
    usage.pop("prompt_tokens_details", None)
    usage |= {"prompt_tokens": num_prompt, "total_tokens": num_prompt + usage["completion_tokens"]}
    found["model"] = model or found["model"]
    for name in ("timings", "metrics"):
        found.pop(name, None)
    if reply.metrics is not None:
        found["metrics"] = reply.metrics


def _chunk(
    kind: str, model: str | None, context: ServerContext, reply: TokensReply, choices: list[Any], state: Any, num_prompt: int
) -> Response:
    chunk: dict[str, Any] = {
        "id": reply.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model or context.model_name,
        "system_fingerprint": context.fingerprint,
        "choices": choices,
    }
    if reply.usage is not None:
        num_output = reply.usage.get("completion_tokens")
        chunk["usage"] = Usage(num_prompt, num_output if type(num_output) is int else 0).as_dict()
    if reply.metrics is not None:
        chunk["metrics"] = reply.metrics
    return _json({"chunk": chunk, "stream_state": state.model_dump()})


def _json(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")
