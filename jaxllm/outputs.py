"""The output of the engine core (`EngineCoreOutput`) and the output that a caller receives (`RequestOutput`)."""

from dataclasses import dataclass, field, make_dataclass
from typing import Any

import msgspec
import numpy as np

from jaxllm.errors import RequestFailedError
from jaxllm.request import ErrorKind, FinishReason
from jaxllm.scheduler_output import TokenLogprobs


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """New output of a request after a step. A Struct, because one is made and sent per request and step. Append fields only."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id that ended it; None for EOS, length and abort. For an error, the message."""
    new_logprobs: TokenLogprobs | None = None
    new_prompt_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error_kind: ErrorKind | None = None
    """Set exactly if the finish reason is "error"."""
    queue_seconds: float | None = None
    """With the first token: how long the request waited in the engine core for its first step."""
    prefill_seconds: float | None = None
    """With the first token: the time since that step was planned."""
    pooled: np.ndarray | None = None
    """Set when a pooling request ends: float32, [width] for embed, [prompt tokens, width] for token_embed."""
    accepted_counts: tuple[int, ...] | None = None
    """Steps that have verified drafts of the request so far, by the number of drafts that they accepted; None: none has."""
    num_draft_tokens: int = 0
    """Drafts that they verified."""
    loaded_tokens: dict[str, int] | None = None
    """With the first token: the part of the cached tokens that tiers loaded, by source (host, disk, peer); None: there is none."""
    kv_transfer_params: dict[str, Any] | None = None
    """On the last output of a request whose blocks are kept for a decode engine: what that engine is to be sent with the prompt."""


class Logprob(msgspec.Struct, gc=False):
    """The logprob of one token at one position. A Struct, so that the garbage collector has none of the many to visit."""

    logprob: float
    rank: int | None = None
    """From 1."""
    decoded_token: str | None = None


# For callers of `dataclasses.asdict` and the like: in vLLM it is a dataclass.
Logprob.__dataclass_fields__ = make_dataclass("Logprob", Logprob.__struct_fields__).__dataclass_fields__  # type: ignore[attr-defined]


@dataclass
class RequestMetrics:
    """Times of one request, in seconds since the epoch by a clock that does not jump (`jaxllm.clock`); None until they happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float | None = None
    """How long the first answer waited in the engine core for its first step."""
    prefill_seconds: float | None = None
    """From that step to its first token."""
    accepted_counts: tuple[int, ...] | None = None
    """Steps of a request with one answer that verified drafts, by the number of drafts that they accepted."""
    num_draft_tokens: int = 0
    """Drafts that they verified."""
    num_cached_tokens: int | None = None
    """Prompt tokens of the first answer that came from the prefix cache."""
    loaded_tokens: dict[str, int] | None = None
    """The part of these that was not on the devices but loaded, by source (host, disk, peer); None: there is none."""


@dataclass
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None
    """Set exactly if the finish reason is "error"; `stop_reason` is the message then."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answers to one prompt, whole so far or as a delta (SamplingParams.output_kind)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One per prompt token; the first is None."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; if a prefill engine computed the prompt, from that one's."""
    num_cache_creation_tokens: int = 0
    """Prompt tokens that were computed, in full blocks that the prefix cache keeps."""
    kv_transfer_params: dict[str, Any] | None = None
    """With the last answer of a request whose blocks are kept for a decode engine: what that engine is to be sent with the prompt."""
    metrics: RequestMetrics | None = field(default=None, repr=False)


@dataclass
class PoolingOutput:
    """The pooled hidden states of a prompt."""

    data: np.ndarray
    """float32: [width], or one row per prompt token for token_embed. Empty if the request was aborted or failed."""


@dataclass
class PoolingRequestOutput:
    """The vector of one prompt, or the vectors of its tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """The token ids that were computed, after truncation."""
    outputs: PoolingOutput
    finish_reason: str = "stop"
    """stop; abort; or error, with what went wrong in `error`."""
    error: str | None = None
    error_kind: ErrorKind | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = field(default=None, repr=False)


@dataclass
class EmbeddingOutput:
    """The vector of a prompt as plain numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each class, in the order of the model's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The similarity of two texts: the cosine of their vectors, -1 to 1, or the score that a classifier of pairs gives them."""

    score: float


@dataclass
class EmbeddingRequestOutput:
    """Result of `LLM.embed` for a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class ClassificationRequestOutput:
    """Result of `LLM.classify` for a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class ScoringRequestOutput:
    """Result of `LLM.score` for a pair."""

    request_id: str
    prompt_token_ids: list[int]
    """Token ids of the first text, then of the second."""
    outputs: ScoringOutput
    num_cached_tokens: int = 0
    finished: bool = True


def raise_error(output: RequestOutput | PoolingRequestOutput, where: str = "the request") -> None:
    """Raise RequestFailedError if a request failed alone: a script must not mistake its partial text for an answer."""
    if isinstance(output, PoolingRequestOutput):
        if output.error is not None:
            raise RequestFailedError(f"{where} failed: {output.error}", output.error_kind or "internal")
        return
    for answer in output.outputs:
        if answer.finish_reason == "error":
            raise RequestFailedError(f"{where} failed: {answer.stop_reason}", answer.error_kind or "internal")
