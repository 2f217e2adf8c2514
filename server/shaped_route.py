"""Routes of APIs whose errors have a shape of their own."""

from collections.abc import Awaitable, Callable

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.log import logger
from server.error_shapes import shaped
from server.errors import as_api_error
from server.sse import ClientDisconnected


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
                told = shaped(request.scope, as_api_error(error))
                if told.code == "internal_error":
                    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
                return told.response()

        return turned
