"""POST /v1/embeddings, /pooling, /classify, /score and /rerank, with the paths used by other servers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
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
from jaxllm.text.pairs import PairCut
from server.body import read_body
from server.chat_service import Conversation
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.errors import bad_request
from server.openapi import json_body
from server.pooling_service import Input, Pair, PoolingService, usage_of
from server.protocol.common import engine_options
from server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    PromptFields,
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
    """One vector for each input, the vectors of each of its tokens, or a number for each class."""
    body = await read_body(request, PoolingRequest)
    return await _vectors(request, body, body.task, _Kind("pool", "pooling", "data"))


@router.post("/classify", openapi_extra=json_body(ClassifyRequest))
@router.post("/v1/classify", openapi_extra=json_body(ClassifyRequest))
async def create_classes(request: Request) -> Response:
    """The likeliest class of each input, and the probability of each class."""
    body = await read_body(request, ClassifyRequest)
    params = _prompt_params(body, "classify")
    request_id = f"classify-{request_id_of(request, body.request_id)}"
    context, model, outputs = await _pool(
        request, body, [Input(prompt, "input", params) for prompt in _inputs(body)], request_id
    )
    classifier = context.engine.model_config.classifier
    assert classifier is not None, "the request was refused"
    data = []
    for place, output in enumerate(outputs):
        probs = output.outputs.data
        label = classifier.labels[int(probs.argmax())]
        data.append({"index": place, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return Response(_json({**_head(model, request_id), "data": data, "usage": _usage(context, outputs)}), media_type=_JSON)


@router.post("/score", openapi_extra=json_body(ScoreRequest))
@router.post("/v1/score", openapi_extra=json_body(ScoreRequest))
async def create_score(request: Request) -> Response:
    """Scores of pairs of texts: the cosine of their vectors, or what a model that scores pairs gives."""
    body = await read_body(request, ScoreRequest)
    names, first, second = _score_texts(body)
    wanted = pairs(len(first), len(second), names)
    request_id = f"score-{request_id_of(request, body.request_id)}"
    found = await _scores(request, body, names, (first, second), wanted, request_id)
    data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(found.scores)]
    return Response(_json({**_head(found.model, request_id), "data": data, "usage": found.usage}), media_type=_JSON)


@router.post("/rerank", openapi_extra=json_body(RerankRequest))
@router.post("/v1/rerank", openapi_extra=json_body(RerankRequest))
@router.post("/v2/rerank", openapi_extra=json_body(RerankRequest))
async def create_rerank(request: Request) -> Response:
    """Documents ranked by their scores with a query."""
    body = await read_body(request, RerankRequest)
    if body.top_n is not None and body.top_n < 0:
        raise bad_request(f"top_n is {body.top_n}, must be at least 1, or 0 for all documents", "top_n")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    request_id = f"rerank-{request_id_of(request, body.request_id)}"
    wanted = [(0, place) for place in range(len(texts))]
    found = await _scores(request, body, ("query", "documents"), ([body.query], texts), wanted, request_id)
    scores = found.scores
    order = sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n or None]
    results = [
        {
            "index": place,
            **({"document": {"text": texts[place]}} if body.return_documents else {}),
            "relevance_score": scores[place],
        }
        for place in order
    ]
    return Response(_json({"id": request_id, "model": found.model, "usage": found.usage, "results": results}), media_type=_JSON)


class _Kind(NamedTuple):
    """Names of a reply's object and fields."""

    prefix: str
    object: str
    field: str


async def _vectors(request: Request, body: VectorFields, task: str | None, kind: _Kind) -> Response:
    params = _prompt_params(body, task, body.dimensions)
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


def _inputs(body: PromptFields) -> Sequence[str | list[int]]:
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


class _Scores(NamedTuple):
    """Scores of pairs, with what a reply says of the request."""

    scores: list[float]
    model: str
    usage: dict[str, Any]


async def _scores(
    request: Request,
    body: ScoreRequest | RerankRequest,
    names: tuple[str, str],
    texts: tuple[Sequence[str], Sequence[str]],
    wanted: Sequence[tuple[int, int]],
    request_id: str,
) -> _Scores:
    """Score pairs of texts. names: of the two lists in the body; wanted: the places of each pair in these."""
    first, second = texts
    engine = context_of(request).engine
    limits = [_limit(body, name, engine.max_model_len) for name in ("max_tokens_per_query", "max_tokens_per_doc")]
    length, side = body.truncate_prompt_tokens, body.truncation_side or "right"
    if engine.model_config.classifier is not None:
        params = PoolingParams(
            task="classify", use_activation=body.use_activation, truncate_prompt_tokens=length, truncation_side=side
        )
        together = [Pair((first[i], second[j]), names) for i, j in wanted]
        cut, special = PairCut(length, limits[0], limits[1], side), body.add_special_tokens is not False
        make = partial(_service(context_of(request)).pair_inputs, together, cut, params, add_special_tokens=special)
        context, model, outputs = await _pool(request, body, make, request_id)
        scores = [float(output.outputs.data[0]) for output in outputs]
    else:
        if body.use_activation is not None:
            raise bad_request(
                "use_activation is for models that score pairs; here a score is the cosine of two vectors: leave it out"
            )
        kept = [length if most is None else most if length in (None, -1) else min(most, length) for most in limits]
        of_first, of_second = (PoolingParams(task="embed", truncate_prompt_tokens=most, truncation_side=side) for most in kept)
        inputs = [Input(text, names[0], of_first) for text in first] + [Input(text, names[1], of_second) for text in second]
        context, model, outputs = await _pool(request, body, inputs, request_id)
        vectors = [output.outputs.data for output in outputs]
        # In a thread, because many of them take time.
        scores = await asyncio.to_thread(lambda: [cosine(vectors[i], vectors[len(first) + j]) for i, j in wanted])
    return _Scores(scores, model, _usage(context, outputs))


def _limit(body: ScoreRequest | RerankRequest, name: str, longest: int) -> int | None:
    """The number of tokens in the field `name`, at most `longest`."""
    limit = getattr(body, name)
    if limit is not None and limit < 1:
        raise bad_request(f"{name} is {limit}, must be at least 1", name)
    return limit if limit is None else min(limit, longest)


def _prompt_params(body: PromptFields, task: str | None, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(
        task=task,  # type: ignore[arg-type]
        use_activation=body.use_activation,
        dimensions=dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "right",
    )


def _service(context: ServerContext) -> PoolingService:
    return PoolingService(context.engine, context.options.limits, context.work)


async def _pool(
    request: Request,
    body: PoolingFields,
    inputs: Sequence[Input] | Callable[[], Awaitable[Sequence[Input]]],
    request_id: str,
) -> tuple[ServerContext, str, list[PoolingRequestOutput]]:
    """Compute the vectors of all inputs, or of those that a function makes. Returns the model's name for the reply too."""
    context = context_of(request)
    service = _service(context)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        adapter = await context.adapter_of(body.model)
        special = body.add_special_tokens
        inputs = inputs if isinstance(inputs, Sequence) else await inputs()
        if isinstance(body, PromptFields) and body.messages is not None:
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


def _conversation(body: PromptFields, context: ServerContext, request_id: str) -> Conversation:
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
