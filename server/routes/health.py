"""Probes (process alive, engine able to serve, requests accepted), and the version."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.engine.async_core import ReplicaInfo
from server.context import context_of
from server.errors import ApiError

router = APIRouter(tags=["Operation"])


@router.get("/live")
async def live() -> Response:
    """200 as long as the process answers."""
    return Response(status_code=200)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine can serve, or may go on to by itself, else 503. The body has its state, and that of each replica."""
    engine = context_of(request).engine
    await engine.check_health()
    replicas = engine.replicas()
    serving = [replica for replica in replicas if replica.state == "serving"]
    found = {"status": (serving or replicas)[0].state, "replicas": [_described(replica) for replica in replicas]}
    return Response(msgspec.json.encode(found), media_type="application/json")


def _described(replica: ReplicaInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rank": replica.rank,
        **({"role": replica.role} if replica.role else {}),
        "state": replica.state,
        "running": replica.stats.num_running,
        "waiting": replica.stats.num_waiting,
        "last_tick_seconds": round(replica.tick_seconds, 2),
    }
    return found | ({"detail": replica.detail} if replica.detail else {})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken and the engine does not seem to hang, else 503."""
    context = context_of(request)
    await context.engine.check_ready()
    if (reason := context.refusal) is not None:
        raise reason
    return Response(status_code=200)


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """Same as /health, under the name that some platforms use."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, Any]:
    """The version of jaxllm."""
    return {"version": __version__}


@router.get("/load")
async def load(request: Request) -> dict[str, Any]:
    """How many requests are being answered."""
    context = context_of(request)
    if not context.options.logging.enable_server_load_tracking:
        raise ApiError(404, "load is not tracked (--no-enable-server-load-tracking)")
    return {"server_load": context.num_running}
