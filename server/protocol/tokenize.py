"""The bodies of /tokenize and /detokenize."""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.protocol.chat import MAX_TOOLS, Message, Tool
from server.protocol.common import ImageSettings, Items, RequestModel


class TokenizeRequest(RequestModel):
    """A prompt or a conversation, whose tokens are wanted."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    documents: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for a conversation."""
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ImageSettings | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids whose text is wanted."""

    model: str | None = None
    tokens: Items[int]
