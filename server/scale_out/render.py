"""Requests of text become requests of token ids: the body of generate, complete in itself."""

from typing import Any

from jaxllm.request_options import OPTION_NAMES
from jaxllm.text.input_processor import ParentRequest
from server.chat_service import Conversation
from server.errors import bad_request
from server.protocol.common import SamplingFields
from server.protocol.scale_out import GenerateRequest
from server.scale_out.sampling import as_json


def refuse_search(body: SamplingFields) -> None:
    """Raise ApiError for a beam search, which is no request of the engine."""
    if body.use_beam_search:
        raise bad_request("use_beam_search cannot be rendered; send it to this server without /render", "use_beam_search")


def generate_body(
    request: ParentRequest, model: str | None, body: Any, conversation: Conversation | None = None
) -> dict[str, Any]:
    """The body of generate for a request that the engine would accept. `body`: of the client, for what concerns the reply.

    Raises ApiError for images, which are no part of such a body.
    """
    child = request.children[0]
    if child.items:
        raise bad_request("messages with images cannot be rendered; send them to this server without /render", "messages")
    options = getattr(body, "stream_options", None)
    found: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.prompt_token_ids,
        "sampling_params": as_json(request.params),
        "model": model,
        "stream": bool(body.stream),
        "stream_options": options.model_dump() if isinstance(body, SamplingFields) and options is not None else None,
        "return_token_ids": getattr(body, "return_token_ids", None),
        "kv_transfer_params": body.kv_transfer_params,
        **{name: getattr(child.options, name) for name in GenerateRequest.model_fields if name in OPTION_NAMES},
    }
    if conversation is not None:
        found["parse_context"] = {
            "tools": conversation.tools,
            "tool_choice": conversation.tool_choice or ("auto" if conversation.tools else "none"),
            "parallel_tool_calls": conversation.parallel_tool_calls,
            "include_reasoning": conversation.include_reasoning,
            "chat_template_kwargs": dict(conversation.chat_template_kwargs or {}),
            "history_tool_call_cnt": sum(len(message.get("tool_calls") or ()) for message in conversation.messages),
        }
    return found
