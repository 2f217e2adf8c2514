"""Interceptor of every gRPC method: checks the key and the message, and converts errors to gRPC status codes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxllm.log import logger
from server.errors import ApiError, as_api_error

STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC codes of HTTP statuses; all others are INTERNAL."""
PUBLIC = "/grpc.health.v1.Health/"

IsAllowed = Callable[[str | None], bool]
"""Whether a caller with this `authorization` has access."""


class Gate(grpc.aio.ServerInterceptor):
    """Admits callers with a key (the health service is open to all), and answers every error with a status and a text."""

    def __init__(self, is_allowed: IsAllowed):
        self._is_allowed = is_allowed

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: UNIMPLEMENTED
        refused = None
        if not details.method.startswith(PUBLIC) and not self._is_allowed(authorization_of(details.invocation_metadata)):
            refused = ApiError(401, "the key in the metadata `authorization` is missing or wrong; send `Bearer KEY`")
        if handler.request_streaming:
            return handler if refused is None else grpc.stream_stream_rpc_method_handler(_refusal(refused))
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler, refused), None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(_single(handler, refused), None, handler.response_serializer)


def authorization_of(metadata: Any) -> str | None:
    """The `authorization` metadata of a call."""
    value = next((value for key, value in metadata or () if key == "authorization"), None)
    return value if value is None or isinstance(value, str) else value.decode("latin-1")


def key_in(authorization: str | None) -> bytes | None:
    """The key of an `authorization`."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.encode("utf-8", "replace") if scheme.lower() == "bearer" else None


def status_of(error: ApiError) -> grpc.StatusCode:
    """The gRPC status that corresponds to the error's HTTP status."""
    if error.code == "overloaded":
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return STATUS.get(error.status, grpc.StatusCode.INTERNAL)


async def _tell(context: Any, error: BaseException) -> None:
    """Abort the call with the client's version of an error."""
    told = as_api_error(error)
    if told.code == "internal_error":
        logger.error("a gRPC call failed", exc_info=error)
    details = []
    if told.param is not None and told.param.isascii() and told.param.isprintable():
        details.append(("jaxllm-param", told.param))
    if "retry-after" in told.headers:
        details.append(("retry-after", told.headers["retry-after"]))
    await context.abort(status_of(told), str(told), tuple(details))


def _parsed(handler: Any, raw: bytes) -> Any:
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise ApiError(400, "the message is not what jaxllm.proto describes") from None


def _refusal(refused: ApiError) -> Callable[[Any, Any], Awaitable[None]]:
    async def refuse(requests: Any, context: Any) -> None:
        await _tell(context, refused)

    return refuse


def _single(handler: Any, refused: ApiError | None) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def call(raw: bytes, context: Any) -> Any:
        try:
            if refused is not None:
                raise refused
            return await handler.unary_unary(_parsed(handler, raw), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _tell(context, error)

    return call


def _streaming(handler: Any, refused: ApiError | None) -> Callable[[bytes, Any], AsyncIterator[Any]]:
    async def call(raw: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            if refused is not None:
                raise refused
            async with contextlib.aclosing(handler.unary_stream(_parsed(handler, raw), context)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _tell(context, error)

    return call
