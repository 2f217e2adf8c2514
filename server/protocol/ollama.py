"""Bodies of ollama's /api/chat, /api/generate, /api/show and /api/embed."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from server.protocol.chat import MAX_TOOLS, MessageToolCall
from server.protocol.common import MAX_LABELS, Int64, Items, RequestModel

MAX_IMAGES = 1024
"""Maximum number of images of a prompt; the model may take fewer (--limit-mm-per-prompt)."""
LOADING = frozenset(
    (
        "num_ctx",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "num_keep",
        "numa",
        "use_mmap",
        "use_mlock",
        "low_vram",
        "f16_kv",
    )
)
"""Options for loading a model; without effect, because the model is loaded at the start."""
NEUTRAL: Mapping[str, Any] = {"typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0, "penalize_newline": True, "repeat_last_n": -1}
"""Options that are accepted only with these values, which describe the actual behaviour."""


class Options(RequestModel):
    """`options`: how tokens are chosen."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | Items[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaRequest(RequestModel):
    """Fields of both requests."""

    model: str | None = None
    stream: bool | None = None
    """None: yes."""
    format: Literal["json", ""] | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | int | float | None = None
    """No effect: the model stays loaded."""


class OllamaMessage(RequestModel):
    """A message of /api/chat."""

    role: str = Field(min_length=1, max_length=64)
    content: str | None = None
    thinking: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_name: str | None = None
    images: Items[str] | None = None


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Items[OllamaMessage] = []
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "suffix": "a prompt in the model's own fill-in-the-middle format, with raw",
        "template": "raw, with a prompt that has the template's text",
        "context": "/api/chat, with the messages so far",
    }

    prompt: str | None = None
    system: str | None = None
    images: Annotated[Items[str], Field(max_length=MAX_IMAGES)] | None = None
    raw: bool | None = None
    """The prompt is what the model reads: no chat template."""


class OllamaShowRequest(RequestModel):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    """The older name of the field."""
    verbose: bool | None = None
    """No effect: there is nothing more to show."""


class _EmbeddingFields(RequestModel):
    """Fields of both requests for vectors."""

    model: str | None = None
    options: Annotated[dict[str, Any], Field(max_length=MAX_LABELS)] | None = None
    keep_alive: str | int | float | None = None
    """No effect: the model stays loaded, with the context that it was loaded with."""


class OllamaEmbedRequest(_EmbeddingFields):
    """POST /api/embed."""

    input: str | Items[str] = []
    truncate: bool | None = None
    """Whether texts longer than the context are cut; None: yes."""
    dimensions: int | None = None


class OllamaEmbeddingsRequest(_EmbeddingFields):
    """POST /api/embeddings."""

    prompt: str | None = None
