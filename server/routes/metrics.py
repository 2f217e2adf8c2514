"""GET /metrics, for Prometheus."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import ConfigError, EngineError
from jaxllm.metrics.prometheus import EXPOSITION_TYPE, exposition
from server.context import context_of

router = APIRouter(tags=["Operation"])


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The engine's metrics and those of HTTP; the latter alone if the engine has none."""
    context = context_of(request)
    try:
        found = await context.engine.get_metrics()
    except (EngineError, ConfigError):
        found = context.http_metrics.snapshot()
    return Response(exposition(found, prefix=context.options.logging.metrics_prefix), media_type=EXPOSITION_TYPE)
