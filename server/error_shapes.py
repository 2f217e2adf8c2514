"""Chooses the format of an error: OpenAI's or vLLM's, as the option says, unless the path belongs to another API."""

from starlette.types import Scope

from server.errors import ApiError
from server.messages.errors import as_anthropic_error
from server.ollama.errors import as_ollama_error
from server.options import ErrorFormat
from server.vllm_errors import as_vllm_error


def in_shape_of(path: str, error: ApiError, error_format: ErrorFormat) -> ApiError:
    """Convert an error to the format of a path's API."""
    if "/v1/messages" in path:
        return as_anthropic_error(error)
    if path.startswith("/api/"):
        return as_ollama_error(error)
    return as_vllm_error(error) if error_format == "vllm" else error


def shaped(scope: Scope, error: ApiError) -> ApiError:
    """Convert an error to the format that a request to the application expects."""
    return in_shape_of(scope["path"], error, scope["app"].state.context.options.replies.error_format)
