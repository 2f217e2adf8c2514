"""Endpoints for operators; available only with --enable-dev-endpoints and the operator's key."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.errors import ConfigError, EngineDeadError, EngineError, EngineSleepingError, OverloadedError
from server.context import context_of
from server.errors import ApiError, without_leaks

router = APIRouter(tags=["Operator"])


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Report to operators, in the engine's own words, why a request cannot be served now or with these options."""
    try:
        yield
    except (EngineDeadError, EngineSleepingError, OverloadedError):
        raise
    except EngineError as error:
        raise ApiError(409, without_leaks(str(error)), code="not_possible_now") from None
    except ConfigError as error:
        raise ApiError(400, without_leaks(str(error)), code="not_configured") from None


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, Any]:
    """Clear the prefix cache, on devices and in host memory; reset_external: also on disk, for all engines that share it."""
    if not await context_of(request).engine.reset_prefix_cache(reset_running_requests, reset_external):
        raise ApiError(409, "blocks are in use; wait for the running requests or set reset_running_requests", code="in_use")
    return {"success": True}


@router.post("/sleep")
async def sleep(
    request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["abort", "refuse"] = "abort"
) -> Response:
    """Release device memory: level 1 keeps the weights in host memory, level 2 discards them.

    Running requests are aborted, or prevent the engine from sleeping (mode "refuse").
    """
    context = context_of(request)
    with _told(), context.http_metrics.sleep_mode("sleep"):
        await context.engine.sleep(level, mode)
    return Response(status_code=200)


@router.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None) -> Response:
    """Wake the engine up; with `tags` only those allocate memory, and requests are accepted once both have."""
    context = context_of(request)
    with context.http_metrics.sleep_mode("wake"):
        await context.engine.wake_up(tags)
    return Response(status_code=200)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, Any]:
    """Whether the engine is asleep."""
    return {"is_sleeping": await context_of(request).engine.is_sleeping()}


@router.post("/pause")
async def pause(request: Request, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> dict[str, Any]:
    """Hold new requests until /resume.

    Running requests are aborted, completed ("wait") or suspended ("keep").
    """
    await context_of(request).engine.pause(mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, Any]:
    """Resume computing, and start the requests that arrived meanwhile."""
    await context_of(request).engine.resume()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, Any]:
    """Whether requests are held."""
    return {"is_paused": await context_of(request).engine.is_paused()}


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Every option of engine and server, without keys, and the kernels that the engine uses."""
    context = context_of(request)
    access = dataclasses.replace(context.options.access, api_key=None, admin_api_key=None)
    options = dataclasses.replace(context.options, access=access)
    engine = context.engine
    kernels = {op: dataclasses.asdict(report) for op, report in engine.kernels.items()}
    return {"version": __version__, "engine": engine.config.flat(), "kernels": kernels, "server": options.flat()}


@router.get("/expert_load")
async def expert_load(request: Request) -> dict[str, Any]:
    """How many tokens each expert of a mixture got since the start, by layer."""
    with _told():
        return await context_of(request).engine.expert_load()  # type: ignore[no-any-return]


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Start recording a device trace in the directory of --profiler-dir."""
    with _told():
        await context_of(request).engine.start_profile()
    return Response(status_code=200)


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Stop recording and write the trace."""
    with _told():
        await context_of(request).engine.stop_profile()
    return Response(status_code=200)
