"""Errors in ollama's shape: {"error": message}."""

import msgspec

from server.errors import MAX_MESSAGE_LENGTH, ApiError, as_api_error, shortened


class OllamaError(ApiError):
    """An error with a body in ollama's format."""

    def __init__(self, error: ApiError):
        super().__init__(error.status, str(error), type=error.type, param=error.param, code=error.code, headers=error.headers)

    def body(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode({"error": shortened(str(self), MAX_MESSAGE_LENGTH)})


def as_ollama_error(error: BaseException) -> OllamaError:
    """Convert an exception to a client error."""
    return error if isinstance(error, OllamaError) else OllamaError(as_api_error(error))
