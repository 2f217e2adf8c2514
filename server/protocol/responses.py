"""Bodies of the Responses API, as far as an engine that writes text supports them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.protocol.chat import MAX_TOOLS
from server.protocol.common import MAX_LABELS, Items, RequestModel, ShortText
from server.protocol.passed_on import NOT_IN_OTHER_APIS, PassedOn

MAX_METADATA = 16
"""Key-value pairs; keys have at most 64 characters and values 512, as in OpenAI's API."""


class JsonSchemaFormat(RequestModel):
    """`text.format` that asks for JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(RequestModel):
    """`text.format` without a schema."""

    type: Literal["text", "json_object"]


class TextConfig(RequestModel):
    """`text`."""

    format: JsonSchemaFormat | TextFormat | None = Field(default=None, discriminator="type")
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestModel):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(RequestModel):
    """`stream_options`."""

    include_obfuscation: bool | None = None


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomToolFormat(RequestModel):
    """Format of a custom tool's input."""

    type: str


class CustomTool(RequestModel):
    """A tool that takes plain text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomToolFormat | None = None


class Message(RequestModel):
    """An input item: a message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[dict[str, Any]]


class FunctionCall(RequestModel):
    """An input item: a call that the model made."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str


class FunctionCallOutput(RequestModel):
    """An input item: what a call returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[dict[str, Any]]


class CustomToolCall(RequestModel):
    """An input item: a call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: str


class CustomToolCallOutput(RequestModel):
    """An input item: what such a call returned."""

    type: Literal["custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[dict[str, Any]]


class ReasoningItem(RequestModel):
    """An input item: reasoning of the model."""

    type: Literal["reasoning"]
    content: Items[dict[str, Any]] | None = None
    summary: Items[dict[str, Any]] = []


class ResponsesRequest(PassedOn):
    """POST /v1/responses."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **NOT_IN_OTHER_APIS,
        "prompt": "instructions and input; stored prompts are OpenAI's",
        "conversation": "previous_response_id; conversations are OpenAI's",
        "context_management": "truncation 'auto'",
        "background_options": "background alone, which begins at once",
        "previous_input_messages": "input, with the whole conversation",
        "enable_response_messages": "/tokenize with the messages, for what the model reads",
        "image": "input, with a part of type input_image",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
        "logprobs": "top_logprobs, or include with message.output_text.logprobs",
    }

    model: str | None = None
    input: str | Items[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: Annotated[Items[str], Field(max_length=MAX_LABELS)] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1)
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextConfig | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stop: str | Items[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: ShortText | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
