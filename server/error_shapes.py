"""The shape that the clients of a path expect errors in: OpenAI's, unless the path is that of another API."""

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
    """An error in the shape that the clients of a path understand."""
    if "/v1/messages" in path:
        return as_anthropic_error(error)
    return as_ollama_error(error) if path.startswith("/api/") else error


class ShapedRoute(APIRoute):
    """A route whose errors have the shape of its path."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """The route's own handler, with its errors turned."""
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
