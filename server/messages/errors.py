"""Errors in Anthropic's shape: {"type": "error", "error": {"type", "message"}}."""

from collections.abc import Awaitable, Callable

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.log import logger
from server.errors import MAX_MESSAGE_LENGTH, ApiError, as_api_error, shortened
from server.sse import ClientDisconnected

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicError(ApiError):
    """An error whose body Anthropic's clients understand."""

    def __init__(self, error: ApiError):
        kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        super().__init__(error.status, str(error), type=kind, param=error.param, code=error.code, headers=error.headers)

    def body(self) -> bytes:
        """The envelope as JSON."""
        message = shortened(str(self), MAX_MESSAGE_LENGTH)
        return msgspec.json.encode({"type": "error", "error": {"type": self.type, "message": message}})


def as_anthropic_error(error: BaseException) -> AnthropicError:
    """What a client may know of an exception."""
    return error if isinstance(error, AnthropicError) else AnthropicError(as_api_error(error))


def in_shape_of(path: str, error: ApiError) -> ApiError:
    """An error in the shape that the clients of a path understand; for what no route has seen."""
    return as_anthropic_error(error) if "/v1/messages" in path else error


class MessagesRoute(APIRoute):
    """A route whose errors are Anthropic's."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """The route's own handler, with its errors turned."""
        handler = super().get_route_handler()

        async def turned(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnected:
                raise
            except Exception as error:
                told = as_anthropic_error(error)
                if told.code == "internal_error":
                    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
                return told.response()

        return turned
