"""Base of the bodies of all generating requests: finite numbers, sampling fields, refused fields."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import CoreSchema

from jaxllm.kv_transfer import read_kv_limits, read_kv_transfer
from jaxllm.request_options import OPTION_NAMES, RequestOptions
from jaxllm.sampling_params import FIELDS, IN_REQUESTS, MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS
from server.errors import bad_request
from server.ignored import log_once
from server.protocol.coercion import coercing

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first error: a body may have a million, which would take minutes."""
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
MAX_SESSION_ID = 512
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 4096
MAX_ARGUMENTS = 4096
"""Most arguments of a logits processor."""
MAX_LABELS = 64
"""Entries of lists and objects of labels, such as metadata."""
ImageSettings = Annotated[dict[str, Any], Field(max_length=MAX_LABELS)]
"""mm_processor_kwargs: how images are prepared, by the names of the model's family."""
ShortText = Annotated[str, Field(max_length=512)]
"""Labels that clients put on requests; the server ignores them."""
TransferParams = Annotated[dict[str, Any], Field(max_length=MAX_LABELS)]
"""kv_transfer_params: of which engine the prompt's blocks come, for which they are kept, and limits. `jaxllm.kv_transfer` checks values."""
CacheSalt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]


def in_words(form: str) -> WrapValidator:
    """For a field of several forms: its errors name these, as "must be …", in place of what is wrong with each."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {form}") from None

    return WrapValidator(check)


RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:@-]+$")]

REMOVED = {
    "guided_json": "structured_outputs {'json': …} or response_format",
    "guided_regex": "structured_outputs {'regex': …}",
    "guided_choice": "structured_outputs {'choice': …}",
    "guided_grammar": "structured_outputs {'grammar': …}",
    "guided_json_object": "response_format {'type': 'json_object'}",
    "guided_decoding_backend": "structured_outputs; there is one backend",
    "guided_whitespace_pattern": "structured_outputs with whitespace_pattern",
}
UNSUPPORTED = {
    "suffix": "a prompt in the model's own fill-in-the-middle format",
    "prompt_embeds": "text or token ids",
    "watermarking": "nothing: outputs carry no watermark",
    "media_io_kwargs": "the server's --media-io-kwargs",
    "mm_processor_kwargs": "/v1/chat/completions, which takes it with --trust-request-mm-kwargs",
    "multi_modal_data": "/v1/chat/completions, with images as parts of messages",
    "multi_modal_uuids": "/v1/chat/completions, with a uuid in the image's part",
    "mm_payload": "images as parts of messages",
    "return_mm_kwargs": "images as parts of messages",
    "audio": "modalities of text alone: chats speak nothing; what a model hears is a part of a message, input_audio",
    "ec_transfer_params": "nothing: this server moves no caches",
    "return_token_offsets": "logprobs with text_offset",
    "return_prompt_text": "echo",
    "return_weight_versions": "nothing: weights do not change",
    "routed_experts_prompt_start": "nothing: experts are not reported",
    "logits_processors": "extra_args with the processors of the server",
    "logits_processor_pattern": "extra_args with the processors of the server",
    "functions": "tools",
    "function_call": "tool_choice",
    "web_search_options": "tools",
    "moderation": "nothing: nothing moderates here",
    "adapter_id": "model",
    "lora_request": "model",
}
NO_EFFECT = {"kv_transfer_params": "such requests leave no KV cache"}
NO_VERBOSITY = "ask for it in the system message"
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_NOTHING_IN: Mapping[str, Any] = {"function_call": "none"}
"""Values of unsupported fields that ask for nothing."""


class RequestModel(BaseModel):
    """A body: no NaN or infinity. Rejects known unsupported fields; `server/body.py` handles unknown ones."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore", populate_by_name=True)

    REFUSED: ClassVar[Mapping[str, str]] = {**REMOVED, **UNSUPPORTED}
    """Fields with their alternatives."""
    NO_EFFECT: ClassVar[Mapping[str, str]] = NO_EFFECT
    """Fields that are accepted without effect, with the reason."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema, of which numbers may come as texts."""
        return coercing(handler(source))

    @classmethod
    def refuse_unsupported(cls, body: Mapping[str, Any]) -> None:
        """Raise ApiError for the first set field that is not supported. Log fields without effect."""
        for name, value in body.items():
            if value is None:
                continue
            if name in cls.NO_EFFECT:
                log_once(f"{name} has no effect: {cls.NO_EFFECT[name]}")
            elif name in cls.REFUSED and name not in cls.model_fields:
                if name in REMOVED or (value not in _NOTHING and value != _NOTHING_IN.get(name)):
                    verb = "was removed" if name in REMOVED else "is not supported"
                    raise bad_request(f"{name} {verb}; use {cls.REFUSED[name]}", name, "unsupported_parameter")
                log_once(f"{name} has no effect: it asks for nothing")


class StreamOptions(RequestModel):
    """Further contents of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RepetitionDetection(RequestModel):
    """When an output that repeats itself is ended."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1


class StructuredOutputs(RequestModel):
    """A constraint of the output; exactly one of the first six."""

    json_schema: Any = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class JsonSchema(RequestModel):
    """The schema of a response_format."""

    name: str = "response"
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Any = Field(None, alias="schema")
    """Where some other servers have it; refused, because it would not hold here."""
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None
    format: dict[str, Any] | None = None


ProcessorArguments = Annotated[
    dict[str, float | str | Annotated[Items[float | str], Field(max_length=MAX_ARGUMENTS)]], Field(max_length=MAX_LABELS)
]
"""By logits processor: numbers and texts, or one of them."""

_JSON_TYPES: Mapping[str, Any] = {
    "top_k": Int64,
    "seed": Int64,
    "stop": str | Items[str],
    "stop_token_ids": Annotated[Items[int], Field(max_length=MAX_STOP_TOKEN_IDS)],
    "logprob_token_ids": Annotated[Items[int], Field(max_length=MAX_LOGPROB_TOKEN_IDS)],
    "allowed_token_ids": Items[int],
    "bad_words": Annotated[Items[str], Field(max_length=MAX_BAD_WORDS)],
    "logit_bias": Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS_ENTRIES)],
    "extra_args": ProcessorArguments,
    "repetition_detection": RepetitionDetection,
    "structured_outputs": StructuredOutputs,
}
"""JSON types of SamplingParams' fields, where they differ from the Python types."""


def _body_field(name: str) -> Any:
    """JSON type and default. A switch has its default; other fields are null unless set, because models may have defaults."""
    described = FIELDS[name]
    if described.type is bool:
        return bool, described.default
    return _JSON_TYPES.get(name, described.type) | None, None


class EngineFields(RequestModel):
    """Fields of every request about its computation; those that are named as in RequestOptions reach the engine as they are."""

    priority: Int64 = 0
    cache_salt: CacheSalt | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class SessionFields(EngineFields):
    """Fields of requests that generate."""

    session_id: Annotated[str, Field(max_length=MAX_SESSION_ID)] | None = None
    """Requests of one session go to one replica; empty: none. The header X-Session-ID serves where a body has none."""


def engine_options(body: RequestModel, **others: Any) -> RequestOptions:
    """The options that a body has, and others. Raises InvalidRequestError."""
    own = {name: getattr(body, name) for name in OPTION_NAMES if name in type(body).model_fields}
    params = getattr(body, "kv_transfer_params", None)
    return RequestOptions(**own, kv_transfer=read_kv_transfer(params), **read_kv_limits(params), **others)


_Sampling = create_model("_Sampling", __base__=SessionFields, **{name: _body_field(name) for name in IN_REQUESTS})


class SamplingFields(_Sampling):  # type: ignore[misc, valid-type]
    """Sampling fields, from SamplingParams, which checks their ranges, and fields for what is reported about sampling."""

    model: str | None = None
    """None or empty: the served model."""
    response_format: ResponseFormat | None = None
    vllm_xargs: ProcessorArguments | None = None
    kv_transfer_params: TransferParams | None = None

    use_beam_search: bool = False
    length_penalty: float | None = None
    best_of: int | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_timings: bool = False

    request_id: RequestId | None = None

    user: ShortText | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], ShortText], Field(max_length=MAX_LABELS)] | None = None
    store: bool | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
