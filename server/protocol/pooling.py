"""The bodies of /v1/embeddings, /pooling, /classify, /score and /rerank."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from server.protocol.chat import Message
from server.protocol.common import EngineFields, ImageSettings, Items, RequestId, RequestModel, ShortText
from server.protocol.completions import Ids, Lists, Texts

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
Activation = Annotated[
    bool | None, Field(validation_alias=AliasChoices("use_activation", "activation", "softmax", "normalize"))
]
"""The others are older names of use_activation."""


class PoolingFields(EngineFields):
    """Fields of all pooling requests. Ranges are checked by PoolingParams."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **RequestModel.REFUSED,
        "padding": "nothing: prompts are never padded",
        "score_template": "the model's own texts, written into the request",
        "kv_transfer_params": "one engine for vectors: prefill and decode engines share requests that generate",
    }
    NO_EFFECT: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None

    request_id: RequestId | None = None
    user: ShortText | None = None


class PromptFields(PoolingFields):
    """Fields of requests with prompts, as texts, token ids or a conversation."""

    input: str | Ids | Texts | Lists | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ImageSettings | None = None

    use_activation: Activation = None


class VectorFields(PromptFields):
    """Fields of requests that are answered with vectors: how these are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"
    dimensions: int | None = None


class EmbeddingRequest(VectorFields):
    """OpenAI's fields and those that vLLM adds."""


class PoolingRequest(VectorFields):
    """vLLM's /pooling: one vector of each prompt (embed), of each of its tokens (token_embed), or a number for each class (classify)."""

    task: str | None = None


class ClassifyRequest(PromptFields):
    """vLLM's /classify: the probability of each class for each prompt."""


class ScoreRequest(PoolingFields):
    """vLLM's /score: two lists of texts, under one of four pairs of names; one with each of many, or in step. use_activation is for
    models that score pairs."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **PoolingFields.REFUSED,
        "instruction": "an instruction written before the texts",
        "chat_template": "texts as the model was trained on them",
    }

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    use_activation: Activation = None


class Document(RequestModel):
    """A document of a rerank request."""

    text: str


class RerankRequest(PoolingFields):
    """The request of Jina and Cohere: which of the documents fit a query best."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **ScoreRequest.REFUSED,
        "rank_fields": "documents as texts",
        "max_chunks_per_doc": "max_tokens_per_doc",
    }

    query: str
    documents: Annotated[Items[str | Document], Field(min_length=1)]
    top_n: int | None = None
    return_documents: bool = True
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    use_activation: Activation = None
