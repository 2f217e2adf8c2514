"""Converts requests of other APIs to chat requests, and maps errors back to the fields that the client sent."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from jaxllm.errors import InvalidRequestError
from server.chat_service import Conversation
from server.context import ServerContext
from server.errors import ApiError, as_api_error
from server.http_metrics import RequestType
from server.protocol.chat import ChatCompletionRequest
from server.routes.chat import to_conversation

Result = TypeVar("Result")
LARGE_BYTES = 64 << 10
"""Body size whose processing takes some milliseconds."""


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
    return conversation


async def unless_small(num_bytes: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Process a body and return the result; a large one is processed in a thread, so that other requests are not delayed."""
    if num_bytes < LARGE_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


@contextlib.contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields of the chat request in errors to the client's own."""
    try:
        yield
    except (ValidationError, InvalidRequestError) as error:
        told = as_api_error(error)
        told.param = names.get(told.param or "", told.param)
        raise told from error
    except ApiError as error:
        error.param = names.get(error.param or "", error.param)
        raise
