"""Errors in Anthropic's shape: {"type": "error", "error": {"type", "message"}}."""

import msgspec

from server.errors import MAX_MESSAGE_LENGTH, ApiError, as_api_error, shortened

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
    """An error with a body in Anthropic's format."""

    def __init__(self, error: ApiError):
        kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        super().__init__(error.status, str(error), type=kind, param=error.param, code=error.code, headers=error.headers)

    def body(self) -> bytes:
        """The envelope as JSON."""
        message = shortened(str(self), MAX_MESSAGE_LENGTH)
        return msgspec.json.encode({"type": "error", "error": {"type": self.type, "message": message}})


def as_anthropic_error(error: BaseException) -> AnthropicError:
    """Convert an exception to a client error."""
    return error if isinstance(error, AnthropicError) else AnthropicError(as_api_error(error))
