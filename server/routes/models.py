"""GET /v1/models and /v1/models/{id}: the one model, under each of its names, and its LoRA adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from jaxllm.adapters import AdapterInfo
from jaxllm.errors import AdapterNotFoundError
from server.context import ServerContext, context_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """The names that requests may use."""
    context = context_of(request)
    models = [_card(name, context) for name in context.model_names]
    return {"object": "list", "data": models + [_card_of(info, context) for info in await context.adapters.infos()]}


@router.get("/v1/models/{model:path}")
async def show_model(request: Request, model: str) -> dict[str, Any]:
    """One of them."""
    context = context_of(request)
    adapter = await context.adapter_of(model)
    if adapter is None:
        return _card(model if model in context.model_names else context.model_name, context)
    info = next((info for info in await context.adapters.infos() if info.name == adapter), None)
    if info is None:
        raise AdapterNotFoundError(f"the adapter {adapter!r} was unloaded", "model")
    return _card_of(info, context)


def _card(name: str, context: ServerContext) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "jaxllm",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
        "input_modalities": ["text", *context.engine.input_processor.media.kinds],
        "chat_sampling": context.chat_defaults,
        "permission": [_permission(name, context)],
    }


def _card_of(info: AdapterInfo, context: ServerContext) -> dict[str, Any]:
    return {**_card(info.name, context), "root": info.path, "parent": context.adapters.parent_of(info.name)}


def _permission(name: str, context: ServerContext) -> dict[str, Any]:
    """The permission object that OpenAI's older clients expect: every caller may use the model."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": context.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
