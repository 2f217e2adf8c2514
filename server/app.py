"""The FastAPI application over an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import JaxLLMError
from jaxllm.log import logger
from server.context import ServerContext
from server.errors import ApiError, as_api_error, validation_error
from server.openapi import install_openapi
from server.options import ServerOptions
from server.routes import chat, completions, health, messages, models, responses
from server.sse import ClientDisconnected

_SENTENCES = {404: "there is nothing at this path", 405: "this path does not take this method"}


def create_app(engine: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """The application: routes, errors in one shape, and the guard in front of everything."""
    options = options or ServerOptions.from_options()
    context = ServerContext(engine, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await app.state.responses.close()

    app = FastAPI(title="jaxllm", version=__version__, lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = context
    responses.install(app, context)
    for room in (completions, chat, responses, messages, models, health):
        app.include_router(room.router)
    install_openapi(app)
    install_errors(app)
    return app


def install_errors(app: FastAPI) -> None:
    """Every exception becomes OpenAI's envelope."""

    async def told(request: Request, error: Exception) -> Response:
        found = as_api_error(error)
        if found.code == "internal_error":
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return found.response()

    async def of_framework(request: Request, error: Any) -> Response:
        sentence = _SENTENCES.get(error.status_code, "the request was refused")
        return ApiError(error.status_code, sentence, headers=error.headers).response()

    async def of_parameters(request: Request, error: Any) -> Response:
        return validation_error([{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(ApiError, told)
    app.add_exception_handler(JaxLLMError, told)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(RequestValidationError, of_parameters)
    app.add_exception_handler(ClientDisconnected, gone)
    app.add_exception_handler(Exception, told)
