"""Errors in vLLM's shape: as OpenAI's, but `code` is the status and types are vLLM's."""

from http import HTTPStatus

import msgspec

from server.errors import MAX_MESSAGE_LENGTH, ApiError, shortened

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 501: "NotImplementedError"}
"""By status. The type of others is the status's own phrase, such as "Service Unavailable"."""


class VllmError(ApiError):
    """An error with a body in vLLM's format."""

    def __init__(self, error: ApiError):
        phrase = HTTPStatus(error.status).phrase
        is_path = error.status == 404 and error.code is None
        kind = phrase if is_path else _TYPES.get(error.status, phrase)
        super().__init__(error.status, str(error), type=kind, param=error.param, code=error.code, headers=error.headers)

    def body(self) -> bytes:
        """The envelope as JSON."""
        if self.status == 401:
            return msgspec.json.encode({"error": "Unauthorized"})
        message = shortened(str(self), MAX_MESSAGE_LENGTH)
        return msgspec.json.encode({"error": {"message": message, "type": self.type, "param": self.param, "code": self.status}})


def as_vllm_error(error: ApiError) -> VllmError:
    """Convert an error to vLLM's format."""
    return error if isinstance(error, VllmError) else VllmError(error)
