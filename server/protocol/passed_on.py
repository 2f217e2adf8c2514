"""Chat fields that the Responses and the Messages API accept too, and pass unchanged to the chat service."""

from collections.abc import Mapping
from typing import Any

from pydantic import create_model

from jaxllm.sampling_params import IN_REQUESTS
from server.protocol.chat import ChatCompletionRequest
from server.protocol.common import RequestModel, SessionFields

NAMES = (
    *(name for name, where in IN_REQUESTS.items() if where.passed_on),
    "vllm_xargs",
    "kv_transfer_params",
    "truncate_prompt_tokens",
    "truncation_side",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    *SessionFields.model_fields,
    "request_id",
)
"""These fields mean the same as in a chat request, whose model checks them."""

NOT_IN_OTHER_APIS: Mapping[str, str] = {
    **RequestModel.REFUSED,
    "n": "several requests",
    "best_of": "several requests",
    "use_beam_search": "/v1/chat/completions",
    "length_penalty": "/v1/chat/completions",
    "prompt_logprobs": "/v1/chat/completions",
    "logprob_token_ids": "/v1/chat/completions",
    "echo": "/v1/chat/completions",
    "continue_final_message": "/v1/chat/completions",
    "return_token_ids": "/v1/chat/completions",
    "return_tokens_as_token_ids": "/v1/chat/completions",
    "stream_interval": "/v1/chat/completions",
    "include_timings": "/v1/chat/completions",
}
"""Fields of the chat API that the replies of the others cannot represent, with their alternatives."""

_FIELDS: dict[str, Any] = {
    name: (ChatCompletionRequest.model_fields[name].annotation, ChatCompletionRequest.model_fields[name]) for name in NAMES
}


class PassedOn(create_model("PassedOnFields", __base__=RequestModel, **_FIELDS)):  # type: ignore[misc]
    """A request that has these fields."""

    def passed_on(self) -> dict[str, Any]:
        """The fields that the client set, for a chat request."""
        return self.model_dump(include=set(NAMES), by_alias=True, exclude_unset=True)
