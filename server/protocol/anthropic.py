"""Bodies of Anthropic's Messages API, as far as an engine that writes text supports them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.protocol.chat import MAX_TOOLS
from server.protocol.common import MAX_LABELS, Items, RequestModel
from server.protocol.passed_on import NOT_IN_OTHER_APIS, PassedOn


class TextBlock(RequestModel):
    """Words."""

    type: Literal["text"]
    text: str


class Base64Source(RequestModel):
    """An image itself."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(RequestModel):
    """Where an image is."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestModel):
    """An image."""

    type: Literal["image"]
    source: Base64Source | UrlSource = Field(discriminator="type")

    @property
    def address(self) -> str:
        """Where it is, as a URL."""
        source = self.source
        return f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url


class ToolUseBlock(RequestModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(RequestModel):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | Items[dict[str, Any]] | None = None
    is_error: bool | None = None


class ThinkingBlock(RequestModel):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class InputMessage(RequestModel):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None
    """Whether the model does not see it before a `tool_reference` or a `tool_addition` names it."""


class ToolReference(RequestModel):
    """The name of a tool: what a search for tools has found, or the tool of a change."""

    type: Literal["tool_reference"]
    tool_name: str | None = None
    name: str | None = None

    @property
    def name_of_tool(self) -> str:
        return self.tool_name or self.name or ""


class ToolDefinition(RequestModel):
    """A tool that is declared in the course of the conversation."""

    type: Literal["tool_definition"]
    definition: Tool


class ToolAddition(RequestModel):
    """From here on the model may call a tool."""

    type: Literal["tool_addition"]
    tool: ToolReference | ToolDefinition = Field(discriminator="type")


class ToolRemoval(RequestModel):
    """From here on it may not."""

    type: Literal["tool_removal"]
    tool: ToolReference


class ToolChoice(RequestModel):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model thinks before it answers.

    `budget_tokens` is checked as Anthropic does. It limits the thinking of models that have tokens to open and close it; others
    ignore it.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1024)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Effort and shape of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(RequestModel):
    """Parts of a long conversation that the server leaves out."""

    type: str
    keep: Any = None


class ContextManagement(RequestModel):
    """Edits of the conversation, of which only those that leave out nothing are supported."""

    edits: Annotated[Items[ContextEdit], Field(max_length=MAX_LABELS)] | None = None


class Prompt(PassedOn):
    """The part of a request that determines the prompt: all that token counting needs."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **NOT_IN_OTHER_APIS,
        "container": "tools that you run yourself",
        "mcp_servers": "tools that you run yourself",
        "response_format": "output_config.format",
        "output_format": "output_config.format",
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort",
    }

    model: str | None = None
    messages: Items[InputMessage] = Field(min_length=1)
    system: str | Items[dict[str, Any]] | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class CountTokensRequest(Prompt):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Prompt):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    metadata: Annotated[dict[str, Any], Field(max_length=MAX_LABELS)] | None = None
    """Accepted as OpenAI's `user` is: it changes nothing."""
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
