"""Every error that a client receives, in OpenAI's envelope: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from jaxllm.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    EngineStalledError,
    InvalidRequestError,
    MediaFetchError,
    OverloadedError,
    ReplicaLostError,
)

MAX_MESSAGE_LENGTH = 1000
MAX_ECHO_LENGTH = 200
"""Maximum number of characters of client input that an error repeats."""
MAX_FAULTS = 10
"""Maximum number of faults reported per body."""
RETRY_AFTER_SECONDS = 1

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_LEAKS = re.compile(r"0x[0-9a-fA-F]{6,}|File \"[^\"]*\"|(?<![\w.])(?:/[\w.@+-]+){2,}\.\w+")
"""Matches addresses, traceback frames and file paths, which third-party libraries put into their messages."""


class ApiError(Exception):
    """An error for the client. `retry` says whether retrying can help; None leaves that to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry: bool | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry is not None:
            self.headers.setdefault("x-should-retry", "true" if retry else "false")
        if status == 503:
            self.headers.setdefault("retry-after", str(RETRY_AFTER_SECONDS))
            self.headers.setdefault("x-should-retry", "true")

    def body(self) -> bytes:
        """The envelope as JSON."""
        message = shortened(str(self), MAX_MESSAGE_LENGTH)
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The envelope as a response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names a field."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to a client error. Internal errors become one neutral sentence."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return validation_error(error.errors(include_url=False, include_context=False, include_input=True))
    if isinstance(error, AdapterNotFoundError):
        return ApiError(404, without_leaks(str(error)), param="model", code="model_not_found")
    if isinstance(error, AdapterError):
        return bad_request(without_leaks(str(error)), "model", "adapter_not_usable")
    if isinstance(error, MediaFetchError):
        return ApiError(error.status, str(error), param=error.param, code="media_not_fetched", retry=error.status >= 500)
    if isinstance(error, InvalidRequestError):
        return bad_request(without_leaks(str(error)), error.param, getattr(error, "code", None))
    if isinstance(error, OverloadedError):
        return overloaded(without_leaks(str(error)), error.retry_after_seconds)
    if isinstance(error, EngineSleepingError):
        return overloaded("the engine sleeps; wake it up or try again later")
    if isinstance(error, EngineStalledError):
        return ApiError(503, f"the engine does not answer now: {error}", code="engine_stalled", retry=True)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine cannot serve any more", code="engine_dead", retry=True)
    if isinstance(error, ReplicaLostError):
        return ApiError(503, str(error), code="replica_lost", retry=True)
    if isinstance(error, EngineError):
        return ApiError(500, "the engine failed on this request", code="engine_error", retry=True)
    if isinstance(error, TimeoutError):
        return ApiError(408, "the request took longer than its time limit", code="timeout", retry=False)
    return ApiError(500, "the server failed on this request", code="internal_error", retry=False)


def constraint_error(error: InvalidRequestError, param: str) -> ApiError:
    """Reword a structured-output error for the request field that caused it."""
    text = str(error) if param == "structured_outputs" else re.sub(r"structured_outputs(\.json\b)?", param, str(error))
    return bad_request(without_leaks(text), param)


def overloaded(message: str, retry_after_seconds: int = RETRY_AFTER_SECONDS) -> ApiError:
    """503: the server is overloaded; try again later."""
    return ApiError(503, message, code="overloaded", headers={"retry-after": str(retry_after_seconds)}, retry=True)


def validation_error(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """Build one 400 from pydantic's errors; the first one gives `param`."""
    told = [_fault_text(fault) for fault in faults[:MAX_FAULTS]]
    more = f" (and {len(faults) - MAX_FAULTS} more faults)" if len(faults) > MAX_FAULTS else ""
    return bad_request("; ".join(dict.fromkeys(told)) + more, _field_of(faults[0]) if faults else None)


def _field_of(fault: Mapping[str, Any]) -> str | None:
    """The field of the body at fault, without the names of union branches."""
    location = fault["loc"]
    return str(location[0]) if location else None


def _fault_text(fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"][:6])
    message = str(fault["msg"]).removeprefix("Value error, ").partition(", unable to ")[0]
    text = f"{shortened(where, 100)}: {message[:1].lower()}{message[1:]}" if where else message
    given = fault.get("input")
    if fault["type"] != "missing" and isinstance(given, (str, int, float, bool, type(None))):
        text += f", got {shortened(repr(shortened(given, MAX_ECHO_LENGTH) if isinstance(given, str) else given), 200)}"
    return without_leaks(text)


def shortened(text: str, length: int) -> str:
    """Truncate a text to the maximum length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def without_leaks(text: str) -> str:
    """Replace addresses, frames and file paths in a message. It may hold a text of the client's, so it is shortened before."""
    return _LEAKS.sub("…", shortened(text, MAX_MESSAGE_LENGTH))
