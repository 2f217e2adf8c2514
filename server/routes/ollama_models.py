"""ollama's API about models: /api/tags, /api/ps, /api/show and /api/version, and their vectors: /api/embed and /api/embeddings."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request_options import RequestOptions
from server.body import read_body
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.errors import bad_request
from server.ollama.about import Checkpoint, details, model_info, time_text
from server.ollama.names import adapter_of
from server.openapi import json_body
from server.pooling_service import Input, PoolingService, usage_of
from server.protocol.ollama import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaShowRequest
from server.shaped_route import ShapedRoute
from server.sse import unless_disconnected

router = APIRouter(tags=["ollama"], route_class=ShapedRoute)
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


@router.get("/api/version")
async def version() -> dict[str, Any]:
    """The version of jaxllm."""
    return {"version": __version__}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The one model, under each of its names, and its adapters."""
    return {"models": await _models(context_of(request))}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """The models in memory; nothing while the engine sleeps."""
    context = context_of(request)
    if await context.engine.is_sleeping():
        return {"models": []}
    more = {"expires_at": NEVER, "context_length": context.engine.max_model_len}
    return {"models": [{**model, "size_vram": model["size"], **more} for model in await _models(context)]}


@router.post("/api/show", openapi_extra=json_body(OllamaShowRequest))
async def show(request: Request) -> dict[str, Any]:
    """One model: its template, defaults, sizes, and what it can do."""
    context = context_of(request)
    body = await read_body(request, OllamaShowRequest)
    name = body.model or body.name
    if not name:
        raise bad_request("model is missing; this server lists its models at /api/tags", "model")
    adapter = await adapter_of(name, context)
    engine, checkpoint = context.engine, await _checkpoint(context)
    values = engine.input_processor.generation_config.chat_values
    parameters = [f"{name:<30} {value}" for name, value in values.items()]
    tokenizer = engine.input_processor.tokenizer
    template = engine.chat_template or (tokenizer.chat_templates.get("default") if tokenizer is not None else None) or ""
    lines = [f"FROM {context.model_name}", *([f"ADAPTER {adapter}"] if adapter else [])]
    lines += [f"PARAMETER {name} {value}" for name, value in values.items()]
    return {
        "modelfile": "\n".join(lines),
        "parameters": "\n".join(parameters),
        "template": template,
        "details": details(engine, checkpoint) | ({"parent_model": context.model_name} if adapter else {}),
        "model_info": model_info(engine, checkpoint),
        "capabilities": _capabilities(context),
        "modified_at": time_text(checkpoint.changed_seconds),
    }


@router.post("/api/embed", openapi_extra=json_body(OllamaEmbedRequest))
async def embed(request: Request) -> Response:
    """A vector of length 1 for each text."""
    began = time.perf_counter()
    body = await read_body(request, OllamaEmbedRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input
    model, outputs = await _vectors(
        request, body, texts, "input", truncate=body.truncate is not False, dimensions=body.dimensions
    )
    return _json(
        {
            "model": model,
            "embeddings": [output.outputs.data.tolist() for output in outputs],
            "total_duration": round((time.perf_counter() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage_of(outputs, tells_cached=False)["prompt_tokens"],
        }
    )


@router.post("/api/embeddings", openapi_extra=json_body(OllamaEmbeddingsRequest))
async def embeddings(request: Request) -> Response:
    """Embed one text, in the older format."""
    body = await read_body(request, OllamaEmbeddingsRequest)
    _, outputs = await _vectors(request, body, [body.prompt] if body.prompt else [], "prompt", truncate=True)
    return _json({"embedding": outputs[0].outputs.data.tolist() if outputs else []})


async def _vectors(
    request: Request,
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest,
    texts: Sequence[str],
    param: str,
    *,
    truncate: bool,
    dimensions: int | None = None,
) -> tuple[str, list[PoolingRequestOutput]]:
    """The model's name for the reply, and the vectors. No text asks only for the model."""
    context = context_of(request)
    service = PoolingService(context.engine, context.options.limits, context.work)
    async with Deadline(context.time_limit(None)) as limit:
        adapter = await adapter_of(body.model, context)
        name = adapter or context.model_name
        if not texts:
            return name, []
        params = PoolingParams(
            task="embed", use_activation=True, dimensions=dimensions, truncate_prompt_tokens=-1 if truncate else None
        )
        inputs = [Input(text, param, params) for text in texts]
        requests = await service.prepare(
            inputs, f"ollama-{request_id_of(request, None)}", options=RequestOptions(adapter=adapter)
        )
    for each in requests:
        context.request_log.write(each)
    async with limit:
        with context.running():
            return name, await unless_disconnected(request.receive, service.run(requests))


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _checkpoint(context: ServerContext) -> Checkpoint:
    return await asyncio.to_thread(lambda: context.checkpoint)


async def _models(context: ServerContext) -> list[dict[str, Any]]:
    checkpoint = await _checkpoint(context)
    about = details(context.engine, checkpoint)
    common = {"modified_at": time_text(checkpoint.changed_seconds)}
    own = {"size": checkpoint.num_bytes, "digest": checkpoint.digest, "details": about}
    models = [{"name": name, "model": name, **common, **own} for name in context.model_names]
    for info in await context.adapters.infos():
        digest = hashlib.sha256(f"{checkpoint.digest} {info.name} {info.path}".encode()).hexdigest()
        of_adapter = {"size": info.num_bytes, "digest": digest, "details": {**about, "parent_model": context.model_name}}
        models.append({"name": info.name, "model": info.name, **common, **of_adapter})
    return models


def _capabilities(context: ServerContext) -> list[str]:
    """Capabilities of the model."""
    if not context.engine.model_config.generates:
        return ["embedding"] if context.engine.model_config.classifier is None else []
    speech = context.chat.speech if context.engine.input_processor.tokenizer is not None else None
    tools = ["tools"] if speech is not None and speech.tool_name is not None else []
    vision = ["vision"] if context.engine.input_processor.media.sees_images else []
    return ["completion", *tools, *vision, *(["thinking"] if speech is not None and speech.reasoning_name is not None else [])]
