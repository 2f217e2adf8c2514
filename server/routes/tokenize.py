"""POST /tokenize and /detokenize: convert between text and token ids without running the model."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.chat_service import Conversation
from server.context import ServerContext, context_of
from server.errors import bad_request, shortened
from server.openapi import json_body
from server.prompts import check_text_length, encode_prompt
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.routes.chat import check_template, to_message
from server.work import Work, in_one_piece

router = APIRouter(tags=["Tokens"])


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    await context.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is None:
        ids = await context.work.run(_encode(body, context))
    else:
        conversation = await context.work.unless_small(in_one_piece(_conversation, body, context))
        ids = (await context.chat.render(conversation)).token_ids
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": context.engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = await context.work.run(in_one_piece(context.tokenizer.convert_ids_to_tokens, ids))
    return Response(msgspec.json.encode(reply), media_type="application/json")


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    await context.adapter_of(body.model)
    tokenizer, ids = context.tokenizer, body.tokens
    if len(ids) > context.engine.max_model_len:
        raise bad_request(f"tokens has {len(ids)} ids, at most {context.engine.max_model_len} are possible", "tokens")
    if ids and not 0 <= min(ids) <= max(ids) < len(tokenizer):
        wrong = next(id for id in ids if not 0 <= id < len(tokenizer))
        raise bad_request(
            f"tokens has the id {shortened(str(wrong), 20)}; the vocabulary has 0 to {len(tokenizer) - 1}", "tokens"
        )
    return {"prompt": await context.work.run(in_one_piece(tokenizer.decode, ids))}


def _encode(body: TokenizeRequest, context: ServerContext) -> Work[list[int]]:
    assert body.prompt is not None
    yield from check_text_length(context.tokenizer, body.prompt, context.engine.max_model_len)
    return encode_prompt(context.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _conversation(body: TokenizeRequest, context: ServerContext) -> Conversation:
    check_template(body.chat_template, body.chat_template_kwargs, context.options.chat)
    add_generation_prompt = body.add_generation_prompt
    return Conversation(
        messages=[to_message(message, place) for place, message in enumerate(body.messages or ())],
        params=context.engine.get_default_sampling_params(),
        request_id="tokenize",
        tools=None if body.tools is None else [tool.model_dump(exclude_none=True) for tool in body.tools],
        add_generation_prompt=not body.continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        documents=body.documents,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        mm_processor_kwargs=body.mm_processor_kwargs,
        reasoning_effort=body.reasoning_effort,
    )
