"""Converts requests of other APIs to chat requests, and maps errors back to the fields that the client sent."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from jaxllm.errors import InvalidRequestError
from server.chat_service import Conversation
from server.context import ServerContext
from server.errors import ApiError, as_api_error
from server.http_metrics import RequestType
from server.protocol.chat import ChatCompletionRequest
from server.routes.chat import to_conversation


def conversation_of(
    fields: Mapping[str, Any], context: ServerContext, request_id: str, request_type: RequestType = "other"
) -> Conversation:
    """Build the conversation of a chat request with these fields. Raises ApiError, InvalidRequestError or ValidationError."""
    conversation = to_conversation(
        ChatCompletionRequest.model_validate({name: value for name, value in fields.items() if value is not None}),
        context,
        request_id,
    )
    conversation.request_id = request_id
    conversation.request_type = request_type
    conversation.is_converted = True
    return conversation


@contextlib.contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields of the chat request in errors to the client's own."""
    try:
        yield
    except (ValidationError, InvalidRequestError) as error:
        told = as_api_error(error)
        told.param = _renamed(told.param, names)
        raise told from error
    except ApiError as error:
        error.param = _renamed(error.param, names)
        raise


def _renamed(param: str | None, names: Mapping[str, str]) -> str | None:
    """The client's field; of an image, which is called by its number, that of the conversation."""
    if param is not None and param.startswith("image "):
        param = "messages"
    return names.get(param or "", param)
