"""The body of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.protocol.common import (
    MAX_LABELS,
    NO_EFFECT,
    NO_VERBOSITY,
    ImageSettings,
    Items,
    RequestModel,
    SamplingFields,
    ShortText,
    in_words,
)

Role = Annotated[str, Field(min_length=1, max_length=64)]
"""Any role that the chat template supports: system, developer, user, assistant, tool, function; ipython, critic and so on."""


class VideoUrl(RequestModel):
    """Where a video is."""

    url: str


class ImageUrl(RequestModel):
    """Where an image is."""

    url: str
    detail: ShortText | None = None


class AudioUrl(RequestModel):
    """Where a clip of audio is."""

    url: str


class InputAudio(RequestModel):
    """A clip of audio as OpenAI has it."""

    data: str | None = None
    """base64; None: what came with the part's uuid."""
    format: ShortText = "wav"
    """Format of the file; its content decides."""


class ContentPart(RequestModel):
    """A part of a message: text, an image, a video or audio. What kind a part is of is checked where the error can name it."""

    type: str | None = None
    """None: the field that it has tells."""
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: str | ImageUrl | None = None
    video_url: str | VideoUrl | None = None
    audio_url: str | AudioUrl | None = None
    input_audio: InputAudio | None = None
    detail: ShortText | None = None
    file_id: ShortText | None = None
    uuid: ShortText | None = None
    """The client's name of the content, instead of it if it was sent before."""

    image_embeds: Any = None
    video_embeds: Any = None
    audio_embeds: Any = None
    """None of these is supported: they tell the kind of a part without a type, for its refusal."""

    @property
    def kind(self) -> str:
        """The type, or the field that tells it."""
        return self.type or next((name for name in _KINDS if getattr(self, name) is not None), "")


_KINDS = (
    "text",
    "image_url",
    "video_url",
    "audio_url",
    "input_audio",
    *(name for name in ContentPart.model_fields if name.endswith("_embeds")),
)


class CalledFunction(RequestModel):
    """Function of a tool call."""

    name: str
    arguments: Any = None
    """JSON text, or an object. Anything else is taken as no arguments: an earlier answer cannot be corrected."""


class MessageToolCall(RequestModel):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestModel):
    """One message of the conversation."""

    role: Role
    content: str | Items[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


MAX_TOOLS = 512


class NamedFunction(RequestModel):
    """The name in a tool_choice."""

    name: str


class NamedToolChoice(RequestModel):
    """A tool_choice that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class NamedTool(RequestModel):
    """A tool that may be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(RequestModel):
    """A tool_choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": "…"}} or {"type": "allowed_tools", "allowed_tools": {"mode": '
    '"auto" or "required", "tools": [{"type": "function", "function": {"name": "…"}}, …]}}'
)


class ChatCompletionRequest(SamplingFields):
    """OpenAI's fields and those that vLLM adds."""

    HARMLESS: ClassVar[Mapping[str, Any]] = {"modalities": ["text"]}
    NO_EFFECT: ClassVar[Mapping[str, str]] = {**NO_EFFECT, "verbosity": NO_VERBOSITY}

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice, in_words(_CHOICES)] | None
    ) = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Items[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[Items[str], Field(max_length=MAX_LABELS)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    mm_processor_kwargs: ImageSettings | None = None
