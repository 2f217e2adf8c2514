"""Bodies of the routes that take or return token ids: generate, abort_requests, derender."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.protocol.chat import MAX_TOOLS, NamedToolChoice, Tool
from server.protocol.common import Items, RequestModel, SessionFields, StreamOptions, TransferParams

TokenId = Annotated[int, Field(ge=0)]
RenderedId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9._:@/+=-]+$")]
"""An id from render, which has a prefix before the client's."""


class ParseContext(RequestModel):
    """Fields of a chat request that say how its answer is parsed."""

    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = "none"
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Only reported: the prompt shows whether thinking is open."""
    history_tool_call_cnt: int = 0
    """Only reported: ids of calls are random."""


class GenerateRequest(SessionFields):
    """A prompt and sampling parameters, both complete."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **RequestModel.REFUSED,
        "features": "/v1/chat/completions for conversations with images",
        "content_parts": "/v1/chat/completions for conversations with images",
    }

    request_id: RenderedId | None = None
    token_ids: Annotated[Items[TokenId], Field(min_length=1)]
    kv_transfer_params: TransferParams | None = None
    sampling_params: dict[str, Any]
    """Fields of SamplingParams."""
    model: str | None = None
    reasoning_ended: bool | None = None
    """Whether a structured output applies from the first token; None: as the prompt shows."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Without effect: the prompt shows whether thinking is open."""
    token_offsets: Items[Any] | None = None
    """Only reported."""
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text", "derender"] = "tokens"
    parse_context: ParseContext | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class AbortRequests(RequestModel):
    """Requests to end, by the ids in their replies."""

    request_ids: Annotated[Items[Annotated[str, Field(max_length=256)]], Field(max_length=4096)]


class TokenLogprob(RequestModel):
    """A token with its logprob."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class PositionLogprobs(TokenLogprob):
    """The sampled token and the likeliest ones."""

    top_logprobs: Items[TokenLogprob] = []


class TokenLogprobs(RequestModel):
    """An entry for each token."""

    content: Items[PositionLogprobs] | None = None


class TokensChoice(RequestModel):
    """An answer as token ids, whole or in part."""

    index: Annotated[int, Field(ge=0)]
    token_ids: Items[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None


class TokensReply(RequestModel):
    """A reply of generate in the mode `tokens`, or a chunk of one."""

    request_id: str | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: Items[TokensChoice]
    prompt_logprobs: Items[Any] | None = None
    prompt_token_ids: Items[TokenId] | None = None
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class StreamState(RequestModel):
    """State that the client carries from one derendered chunk to the next: all earlier chunks, which are read again each time."""

    output_token_ids: Items[TokenId] = []
    output_chunk_lens: Items[Annotated[int, Field(gt=0)]] = []
    """How many of them each chunk had."""
    role_sent: bool = False
    last_tool_call_ids: Items[str] = []
    """Ids of the calls so far."""
    logprob_text_offset: Annotated[int, Field(ge=0)] = 0
    """For completions: where the text of the next token's logprobs begins."""


class _Derender(RequestModel):
    model: str | None = None
    stream: bool | None = None
    generate_chunk: TokensReply | None = None
    """With `stream`: a chunk."""
    stream_state: StreamState | None = None
    """That of the chunk before."""


class DerenderChatRequest(_Derender):
    """A reply of generate that is to become a chat completion."""

    generate_response: TokensReply | None = None
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_token_ids: Items[TokenId] | None = None
    chat_request: dict[str, Any] | None = None
    """The chat request that was rendered."""


class DerenderCompletionRequest(_Derender):
    """Replies of generate, one for each prompt, that are to become a completion; with `stream` a chunk for one prompt."""

    generate_responses: Items[TokensReply] | None = None
    prompt_tokens: Annotated[int, Field(ge=0)] | Items[Annotated[int, Field(ge=0)]] | None = None
    prompt_token_ids: Items[TokenId] | Items[Items[TokenId] | None] | None = None
    completion_request: dict[str, Any] | None = None
    """The completion request that was rendered."""
