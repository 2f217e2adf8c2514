"""POST /v1/embeddings, /pooling, /score and /rerank, with the paths used by other servers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.scoring import cosine, pairs
from server.body import read_body
from server.chat_service import Conversation
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.errors import bad_request
from server.openapi import json_body
from server.pooling_service import Input, PoolingService, usage_of
from server.protocol.common import engine_options
from server.protocol.pooling import (
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorFields,
)
from server.routes.chat import check_template, to_message
from server.sse import unless_disconnected
from server.vectors import as_bytes, as_json
from server.work import in_one_piece

MAX_BYTES_INPUTS = 32
"""Maximum number of prompts of a request in the format bytes, whose reply describes each in one header."""

router = APIRouter(tags=["Pooling"])
_json = msgspec.json.encode
_JSON = "application/json"


@router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """One vector for each input."""
    body = await read_body(request, EmbeddingRequest)
    return await _vectors(request, body, "embed", _Kind("embd", "embedding", "embedding"))


@router.post("/pooling", openapi_extra=json_body(PoolingRequest))
@router.post("/v1/pooling", openapi_extra=json_body(PoolingRequest))
async def create_pooling(request: Request) -> Response:
    """One vector for each input, or the vectors of each of its tokens."""
    body = await read_body(request, PoolingRequest)
    return await _vectors(request, body, body.task or "embed", _Kind("pool", "pooling", "data"))


@router.post("/score", openapi_extra=json_body(ScoreRequest))
@router.post("/v1/score", openapi_extra=json_body(ScoreRequest))
async def create_score(request: Request) -> Response:
    """Similarity of texts: the cosine of their vectors."""
    body = await read_body(request, ScoreRequest)
    names, first, second = _score_texts(body)
    wanted = pairs(len(first), len(second), names)
    request_id = f"score-{request_id_of(request, body.request_id)}"
    first_params, second_params = _params(request, body, "max_tokens_per_query"), _params(request, body, "max_tokens_per_doc")
    inputs = [Input(text, names[0], first_params) for text in first]
    inputs += [Input(text, names[1], second_params) for text in second]
    context, model, outputs = await _pool(request, body, inputs, request_id)
    scores = await _cosines(outputs, [(i, len(first) + j) for i, j in wanted])
    data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
    return Response(_json({**_head(model, request_id), "data": data, "usage": _usage(context, outputs)}), media_type=_JSON)


@router.post("/rerank", openapi_extra=json_body(RerankRequest))
@router.post("/v1/rerank", openapi_extra=json_body(RerankRequest))
@router.post("/v2/rerank", openapi_extra=json_body(RerankRequest))
async def create_rerank(request: Request) -> Response:
    """Documents ranked by similarity to a query."""
    body = await read_body(request, RerankRequest)
    if body.top_n is not None and body.top_n < 0:
        raise bad_request(f"top_n is {body.top_n}, must be at least 1, or 0 for all documents", "top_n")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    request_id = f"rerank-{request_id_of(request, body.request_id)}"
    document_params = _params(request, body, "max_tokens_per_doc")
    inputs = [Input(body.query, "query", _params(request, body, "max_tokens_per_query"))]
    inputs += [Input(text, "documents", document_params) for text in texts]
    context, model, outputs = await _pool(request, body, inputs, request_id)
    scores = await _cosines(outputs, [(0, place) for place in range(1, len(outputs))])
    order = sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n or None]
    results = [
        {
            "index": place,
            **({"document": {"text": texts[place]}} if body.return_documents else {}),
            "relevance_score": scores[place],
        }
        for place in order
    ]
    reply = {"id": request_id, "model": model, "usage": _usage(context, outputs), "results": results}
    return Response(_json(reply), media_type=_JSON)


class _Kind(NamedTuple):
    """Names of a reply's object and fields."""

    prefix: str
    object: str
    field: str


async def _vectors(request: Request, body: VectorFields, task: str, kind: _Kind) -> Response:
    params = PoolingParams(
        task=task,  # type: ignore[arg-type]
        use_activation=body.use_activation,
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "right",
    )
    request_id = f"{kind.prefix}-{request_id_of(request, body.request_id)}"
    inputs = [Input(prompt, "input", params) for prompt in _inputs(body)]
    if body.encoding_format == "bytes" and len(inputs) > MAX_BYTES_INPUTS:
        raise bad_request(
            f"input has {len(inputs)} inputs, with encoding_format bytes at most {MAX_BYTES_INPUTS} are possible; use bytes_only or "
            "base64",
            "encoding_format",
        )
    context, model, outputs = await _pool(request, body, inputs, request_id)
    vectors, usage = [output.outputs.data for output in outputs], _usage(context, outputs)
    head = _head(model, request_id)
    if body.encoding_format.startswith("bytes"):
        return _as_octets(body, vectors, {**head, "usage": usage})
    pieces = [_json(head)[:-1], b',"data":[']
    for place, vector in enumerate(vectors):
        pieces.append(b'%b{"index":%d,"object":%b,%b:' % (b"," * bool(place), place, _json(kind.object), _json(kind.field)))
        pieces += [*await as_json(vector, body.encoding_format, body.embed_dtype, body.endianness), b"}"]
    return _in_pieces([*pieces, b'],"usage":', _json(usage), b"}"])


def _in_pieces(pieces: Sequence[bytes]) -> Response:
    """A reply sent in pieces: joining many megabytes would delay other requests."""

    async def body() -> AsyncGenerator[bytes, None]:
        for piece in pieces:
            yield piece

    length = str(sum(map(len, pieces)))
    return StreamingResponse(body(), headers={"content-length": length}, media_type=_JSON)


def _as_octets(body: VectorFields, vectors: Sequence[np.ndarray], about: dict[str, Any]) -> Response:
    """The concatenated numbers of all vectors; the format bytes gives their offsets in a header."""
    parts = [as_bytes(vector, body.embed_dtype, body.endianness) for vector in vectors]
    headers = {}
    if body.encoding_format == "bytes":
        data, end = [], 0
        for place, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
            start, end = end, end + len(part)
            entry = {"index": place, "embed_dtype": body.embed_dtype, "endianness": body.endianness}
            data.append({**entry, "start": start, "end": end, "shape": list(vector.shape)})
        headers["metadata"] = _json({**about, "data": data}).decode()
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")


def _inputs(body: VectorFields) -> Sequence[str | list[int]]:
    """Prompts as texts or ids; an empty one is a placeholder for the conversation, which is rendered later."""
    if (body.input is None) == (body.messages is None):
        raise bad_request("exactly one of input and messages must be given", "input")
    if body.input is None:
        return [[]]
    prompts: Sequence[Any] = body.input if isinstance(body.input, list) else [body.input]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not prompts or not all(prompts):
        raise bad_request("input is empty, must have at least 1 token", "input")
    return prompts


def _score_texts(body: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """The names of the two fields that hold the texts, and the two lists."""
    known = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
    given = [name for name in dict.fromkeys(name for names in known for name in names) if getattr(body, name) is not None]
    names = next((names for names in known if sorted(names) == sorted(given)), None)
    if names is None:
        choice = ", ".join(" and ".join(names) for names in known)
        raise bad_request(f"give the texts as one of these pairs: {choice}", given[0] if given else "text_1")
    first, second = (getattr(body, name) for name in names)
    return names, [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second


def _params(request: Request, body: ScoreRequest | RerankRequest, limit_name: str) -> PoolingParams:
    """Parameters of a compared text, truncated to the number of tokens in the field `limit_name`."""
    limit, length = getattr(body, limit_name), body.truncate_prompt_tokens
    if limit is not None:
        if limit < 1:
            raise bad_request(f"{limit_name} is {limit}, must be at least 1", limit_name)
        limit = min(limit, context_of(request).engine.max_model_len)
        length = limit if length in (None, -1) else min(limit, length)
    return PoolingParams(task="embed", truncate_prompt_tokens=length, truncation_side=body.truncation_side or "right")


async def _pool(
    request: Request, body: PoolingFields, inputs: Sequence[Input], request_id: str
) -> tuple[ServerContext, str, list[PoolingRequestOutput]]:
    """Compute the vectors of all inputs. Returns the model's name for the reply too."""
    context = context_of(request)
    service = PoolingService(context.engine, context.options.limits, context.work)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        adapter = await context.adapter_of(body.model)
        special = body.add_special_tokens
        if isinstance(body, VectorFields) and body.messages is not None:
            work = in_one_piece(_conversation, body, context, request_id)
            rendered = await context.chat.render(await context.work.unless_small(work))
            inputs = [Input(rendered.token_ids, "messages", inputs[0].params, rendered.images)]
        requests = await service.prepare(
            inputs,
            request_id,
            add_special_tokens=True if special is None else special,
            options=engine_options(body, adapter=adapter),
        )
    for each in requests:
        context.request_log.write(each)
    async with limit:
        with context.running():
            outputs = await unless_disconnected(request.receive, service.run(requests))
    return context, adapter or context.model_name, outputs


def _conversation(body: VectorFields, context: ServerContext, request_id: str) -> Conversation:
    check_template(body.chat_template, body.chat_template_kwargs, context.options.chat)
    return Conversation(
        messages=[to_message(message, place) for place, message in enumerate(body.messages or ())],
        params=SamplingParams(),
        request_id=request_id,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        mm_processor_kwargs=body.mm_processor_kwargs,
    )


def _head(model: str, request_id: str) -> dict[str, Any]:
    return {"id": request_id, "object": "list", "created": int(time.time()), "model": model}


def _usage(context: ServerContext, outputs: Sequence[PoolingRequestOutput]) -> dict[str, Any]:
    return usage_of(outputs, tells_cached=context.options.replies.enable_prompt_tokens_details)


async def _cosines(outputs: Sequence[PoolingRequestOutput], places: Sequence[tuple[int, int]]) -> list[float]:
    """Cosines of pairs of vectors; computed in a thread, because many of them take time."""
    vectors = [output.outputs.data for output in outputs]
    return await asyncio.to_thread(lambda: [cosine(vectors[i], vectors[j]) for i, j in places])
