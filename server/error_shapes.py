"""Chooses the error format by path: OpenAI's, unless the path belongs to another API."""

from collections.abc import Awaitable, Callable

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.log import logger
from server.errors import ApiError, as_api_error
from server.messages.errors import as_anthropic_error
from server.ollama.errors import as_ollama_error
from server.sse import ClientDisconnected


def in_shape_of(path: str, error: ApiError) -> ApiError:
    """Convert an error to the format of a path's API."""
    if "/v1/messages" in path:
        return as_anthropic_error(error)
    return as_ollama_error(error) if path.startswith("/api/") else error


class ShapedRoute(APIRoute):
    """A route whose errors have the format of its path's API."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Wrap the route's handler to convert its errors."""
        handler = super().get_route_handler()

        async def turned(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnected:
                raise
            except Exception as error:
                told = in_shape_of(request.scope["path"], as_api_error(error))
                if told.code == "internal_error":
                    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
                return told.response()

        return turned
