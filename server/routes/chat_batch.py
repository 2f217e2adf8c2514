"""POST /v1/chat/completions/batch: several conversations with the same settings, answered at once."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.errors import bad_request
from server.openapi import json_body
from server.protocol.chat import ChatCompletionRequest, Message
from server.protocol.common import Items
from server.routes.chat import ChatReply, to_conversation
from server.sampling import check_copies
from server.sse import unless_disconnected
from server.work import in_one_piece

router = APIRouter(tags=["OpenAI"])
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "n": (None, 1),
    "use_beam_search": (False,),
    "tools": (None, []),
    "kv_transfer_params": (None, {}),
}
_OF_CHOICE = ("prompt_logprobs", "prompt_token_ids", "timings", "metrics")
"""The parts of a reply that concern its one conversation."""


class BatchChatCompletionRequest(ChatCompletionRequest):
    """A chat request with a list of conversations."""

    messages: Annotated[  # type: ignore[assignment]
        Items[Annotated[Items[Message], Field(min_length=1)]], Field(min_length=1)
    ]


@router.post("/v1/chat/completions/batch", openapi_extra=json_body(BatchChatCompletionRequest))
async def create_chat_completions(request: Request) -> Response:
    """Answer conversations, each with the choice of its place."""
    context = context_of(request)
    body = await read_body(request, BatchChatCompletionRequest)
    request_id = request_id_of(request, body.request_id)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        adapter = await context.adapter_of(body.model)
        _check(body, context)
        replies = []
        for place, messages in enumerate(body.messages):
            one = body.model_copy(update={"messages": messages})
            work = in_one_piece(to_conversation, one, context, f"{request_id}-{place}")
            conversation = await context.work.unless_small(work)
            conversation.adapter = adapter
            replies.append(ChatReply(one, await context.chat.prepare(conversation), context))
    async with limit:
        with context.running():
            answers = await unless_disconnected(request.receive, _all(replies, context))
    return Response(msgspec.json.encode(_joined(f"chatcmpl-{request_id}", answers)), media_type="application/json")


def _check(body: BatchChatCompletionRequest, context: ServerContext) -> None:
    for name, only in _ONLY.items():
        if getattr(body, name) not in only:
            raise bad_request(f"{name} is not supported for several conversations; send them one by one", name)
    check_copies(body, len(body.messages))
    most = context.options.limits.max_prompts_per_request
    if len(body.messages) > most:
        raise bad_request(
            f"messages has {len(body.messages)} conversations, at most {most} are possible (--max-prompts-per-request)",
            "messages",
        )


async def _all(replies: list[ChatReply], context: ServerContext) -> list[dict[str, Any]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reply.whole(context.chat)) for reply in replies]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None  # the others were aborted because of it
    return [task.result() for task in tasks]


def _joined(request_id: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine all answers into one reply, with the total usage."""
    choices, usage = [], answers[0]["usage"]
    for place, answer in enumerate(answers):
        own = {name: answer[name] for name in _OF_CHOICE if name in answer}
        choices.append({**answer["choices"][0], "index": place, **own})
        usage = usage if place == 0 else _sum(usage, answer["usage"])
    whole = {name: value for name, value in answers[0].items() if name not in _OF_CHOICE}
    return {**whole, "id": request_id, "choices": choices, "usage": usage}


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Add numbers by their names; a name that is missing counts as 0."""
    found = dict(other)
    for name, value in one.items():
        found[name] = _sum(value, other.get(name, {})) if isinstance(value, dict) else value + other.get(name, 0)
    return found
