"""Builds the FastAPI application over an engine."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import JaxLLMError
from jaxllm.log import logger
from jaxllm.vllm_compat.environment import with_variables
from server.context import ServerContext
from server.end_leases import EndLeases
from server.error_shapes import shaped
from server.errors import ApiError, as_api_error, validation_error
from server.guard import Guard
from server.http_metrics import HttpMetricsMiddleware
from server.load_header import LoadHeader
from server.middleware import install_middleware
from server.openapi import install_openapi
from server.options import ServerOptions, server_flags
from server.placement_headers import PlacementHeaders
from server.routes import (
    adapters,
    chat,
    chat_batch,
    completions,
    dev,
    docs,
    health,
    invocations,
    messages,
    metrics,
    models,
    ollama,
    ollama_models,
    page,
    pooling,
    responses,
    scale_out,
    tokenize,
    tokenizer_info,
    transcriptions,
)
from server.sse import ClientDisconnected
from server.tracing import TraceHeaders, make_tracer
from server.unknown_paths import no_such_method, no_such_path

DEV_PATHS, ADAPTER_PATHS, SCALE_OUT_PATHS = (
    frozenset(route.path for route in router.routes if isinstance(route, Route))
    for router in (dev.router, adapters.router, scale_out.router)
)
ADMIN_PATHS = DEV_PATHS | ADAPTER_PATHS


class _Application(FastAPI):
    """A FastAPI application with one outermost middleware, which also covers the error responses."""

    guard: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        return self.guard(super().build_middleware_stack())


def create_app(engine: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """Build the application: routes, exception handlers, and the guard as outermost middleware."""
    if options is None:
        options = ServerOptions.from_options(**with_variables({}, [flag.name for flag in server_flags()], os.environ))
    context = ServerContext(engine, options, operators_paths=ADMIN_PATHS)
    unread = engine.hold_unread_streams()
    context.http_metrics.num_held = lambda: unread.num_held
    public_paths: set[str] = set()
    rooms: list[Router] = [completions.router, chat.router, responses.router, messages.router, tokenize.router, models.router]
    rooms += [
        chat_batch.router,
        pooling.router,
        invocations.router,
        ollama.router,
        ollama_models.router,
        health.router,
        metrics.router,
    ]
    if engine.input_processor.media.speech is not None:
        rooms.append(transcriptions.router)
    if options.access.enable_tokenizer_info_endpoint:
        rooms.append(tokenizer_info.router)
    if options.access.enable_dev_endpoints:
        rooms.append(dev.router)
    if options.access.enable_scale_out:
        rooms.append(scale_out.router)
    if options.adapters.allow_runtime_lora_updating:
        rooms.append(adapters.router)
    if not options.replies.disable_fastapi_docs:
        rooms.append(docs.router)
        public_paths |= docs.PUBLIC_PATHS
    if options.replies.web:
        rooms.append(page.page_router())
        public_paths |= page.public_paths()

    tracer = make_tracer(options.logging.otlp_traces_endpoint)
    listeners = [] if tracer is None else [tracer.request_ended]
    listeners += [context.request_log.ended] if context.request_log.is_on else []
    if listeners:
        engine.request_ended = listeners[0] if len(listeners) == 1 else partial(_tell_all, listeners)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.chat.warm_up()
        await context.adapters.load_modules()
        yield
        await app.state.responses.close()
        context.chat.close()
        context.work.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)

    app = _Application(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)

    def guarded(inner: ASGIApp) -> ASGIApp:
        inner = PlacementHeaders(inner, has_replicas=engine.config.parallel.data_parallel_size > 1)
        inner = LoadHeader(inner, engine)
        if engine.config.kv_transfer.is_decode:
            inner = EndLeases(inner, engine)
        guard = Guard(inner, context, public_paths=public_paths, admin_paths=ADMIN_PATHS)
        return HttpMetricsMiddleware(guard if tracer is None else TraceHeaders(guard), context.http_metrics)

    app.guard = guarded
    app.state.context = context
    responses.install(app, context)
    for room in rooms:
        app.router.routes += room.routes  # added one by one: an included router costs every request one more step
    install_openapi(app, root_path=options.network.root_path)
    install_errors(app)
    install_middleware(app, options.network.middleware or ())
    return app


def _tell_all(listeners: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for listener in listeners:
        listener(*arguments)


def install_errors(app: FastAPI) -> None:
    """Answer every exception with an error of the format that the path's API, or the option, asks for."""

    async def told(request: Request, error: Exception) -> Response:
        found = as_api_error(error)
        if found.code == "internal_error":
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return shaped(request.scope, found).response()

    async def of_framework(request: Request, error: Any) -> Response:
        path, sentence, status = request.scope["path"], "the request was refused", error.status_code
        if status == 405 and path in SCALE_OUT_PATHS and not any(getattr(route, "path", None) == path for route in app.routes):
            status = 404  # the path looks like /v1/responses/{response_id}
        if status == 404:
            replies = request.app.state.context.options.replies
            wanting = {
                **dict.fromkeys(DEV_PATHS, "--enable-dev-endpoints"),
                **dict.fromkeys(ADAPTER_PATHS, "--allow-runtime-lora-updating"),
                **dict.fromkeys(SCALE_OUT_PATHS, "--enable-scale-out"),
            }
            sentence = no_such_path(path, app.routes, of_flags=wanting, docs=not replies.disable_fastapi_docs)
        elif status == 405:
            sentence = no_such_method(request.method, path, (error.headers or {}).get("Allow", ""))
        headers = error.headers if status == error.status_code else None
        return shaped(request.scope, ApiError(status, sentence, headers=headers)).response()

    async def of_parameters(request: Request, error: Any) -> Response:
        found = validation_error([{**fault, "loc": fault["loc"][1:]} for fault in error.errors()])
        return shaped(request.scope, found).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has left

    app.add_exception_handler(ApiError, told)
    app.add_exception_handler(JaxLLMError, told)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(RequestValidationError, of_parameters)
    app.add_exception_handler(ClientDisconnected, gone)
    app.add_exception_handler(Exception, told)
