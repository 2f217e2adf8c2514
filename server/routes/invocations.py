"""POST /invocations, SageMaker's endpoint: the body's fields select the actual endpoint."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_object
from server.context import context_of
from server.errors import bad_request
from server.routes.chat import create_chat_completion
from server.routes.completions import create_completion
from server.routes.pooling import create_classes, create_embeddings, create_rerank, create_score

router = APIRouter(tags=["Operation"])

_MEANT: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "input": create_embeddings,
    "text_1": create_score,
    "data_1": create_score,
    "queries": create_score,
    "query": create_rerank,
}


@router.post("/invocations")
async def invoke(request: Request) -> Response:
    """A chat, completion, embedding, class, score or rank."""
    body = await read_object(request)
    name = next((name for name in _MEANT if body.get(name) is not None), None)
    if name is None:
        raise bad_request(f"the body has none of {', '.join(_MEANT)}, which say what is asked for")
    model = context_of(request).engine.model_config
    if name in ("messages", "input") and not model.generates:
        return await (create_embeddings if model.classifier is None else create_classes)(request)
    return await _MEANT[name](request)
