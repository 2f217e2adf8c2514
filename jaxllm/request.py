"""What a caller asks of the engine (`EngineCoreRequest`) and the one mutable record of it while it lives (`Request`)."""

import enum
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended, as users see it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class RequestStatus(enum.IntEnum):
    """Where a request is. Everything after PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASONS.get(self)


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class ErrorKind(enum.StrEnum):
    """What ended a request whose finish reason is "error"."""

    INTERNAL = "internal"
    """Something failed in the engine, in this request or in the step that computed it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device had no memory for it, in steps of any size."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It waited longer than its `queue_timeout_seconds`."""
    TIMEOUT = "timeout"
    """It was not done after its `timeout_seconds`."""
    CONSTRAINT = "constraint"
    """What it asks of its tokens leaves none to go on with."""
    NOT_FINITE = "not_finite"
    """The model computed NaN or infinity for it."""


@dataclass(frozen=True)
class Grammar:
    """A grammar that the front has had compiled, and that is known to be harmless."""

    text: str
    """As llguidance compiles it."""
    num_bytes: int = 0
    """Memory that it takes compiled."""
    start_after_token_ids: tuple[int, ...] | None = None
    """It holds for what follows this run of output tokens."""


class OutputMatcher(Protocol):
    """Follows an output through its grammar."""

    is_done: bool
    """Whether the output is complete, and no EOS will say so."""

    def advance(self, token_id: int) -> None:
        """Take in the next token. Raises GrammarError if the output cannot go on with it."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineCoreRequest:
    """One sequence to generate or to pool, validated, in token ids. What crosses from the front to the engine core."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """n is 1 here (the front fans out), max_tokens is concrete, the seed is set. Of no meaning with pooling_params."""
    pooling_params: PoolingParams | None = None
    """Set: nothing is generated; the request ends when its prompt is computed. Everything in it is concrete."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the request unless sampling_params.ignore_eos; the first is the tokenizer's EOS."""
    arrival_time: float = field(default_factory=time.time)
    priority: int = 0
    cache_salt: str | None = None
    queue_timeout_seconds: float | None = None
    """Ended with an error if it has no place in the batch so long after it was added."""
    timeout_seconds: float | None = None
    """Ended with an error if it is not done so long after it was added."""
    grammar: Grammar | None = None
    """What sampling_params.structured_outputs, which is not set here, has become."""


@dataclass(eq=False)
class Request:
    """A request inside the engine core, from admission to finish. Only the scheduler changes it."""

    spec: EngineCoreRequest
    request_id: str = field(init=False)
    sampling_params: SamplingParams = field(init=False)
    pooling_params: PoolingParams | None = field(init=False)
    eos_token_id: int | None = field(init=False)
    """The tokenizer's EOS; None if there is none or it is to be ignored."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Every other token that ends the request."""
    detects_repetition: bool = field(init=False)
    skip_reading_prefix_cache: bool = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Prompt and output together never get longer; lowered to the model's limit by the scheduler."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache or will be after the steps in flight."""
    num_output_placeholders: int = 0
    """Tokens that steps in flight will sample."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before it."""
    num_preemptions: int = 0
    queued_at: float = 0.0
    """When it came to the scheduler, on the monotonic clock."""
    scheduled_at: float = 0.0
    """When its first step was planned."""
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None
    matcher: OutputMatcher | None = None
    """Of a request with a grammar, once that is compiled; it knows all output tokens."""
    block_hashes: list[bytes] = field(default_factory=list)
    """One per full block of token_ids; kept up to date by `extend_hashes`."""
    extend_hashes: Callable[["Request"], None] | None = None

    def __post_init__(self) -> None:
        spec, params = self.spec, self.spec.sampling_params
        self.request_id = spec.request_id
        self.sampling_params = params
        self.pooling_params = pooling = spec.pooling_params
        eos = () if params.ignore_eos else spec.eos_token_ids
        self.eos_token_id = eos[0] if eos else None
        self.stop_token_ids = frozenset((*eos[1:], *(params.stop_token_ids or ())))
        self.detects_repetition = bool(params.repetition_detection)
        # Prompt logprobs need the hidden state of every prompt token, so nothing of it may come from the cache.
        self.skip_reading_prefix_cache = bool(params.skip_reading_prefix_cache) or params.prompt_logprobs is not None
        self.token_ids = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = sys.maxsize if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        if pooling is not None:
            self.skip_reading_prefix_cache = bool(pooling.skip_reading_prefix_cache)
            self.max_num_tokens = self.num_prompt_tokens + 1  # as if its vector were one token, which is never computed
        if self.extend_hashes is not None:
            self.extend_hashes(self)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy; not for the step loop."""
        return self.token_ids[self.num_prompt_tokens :]

    def append_output(self, token_id: int) -> bool:
        """Add one sampled token. Returns whether it can end the request: if not, `check_stop` need not be asked."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if self.extend_hashes is not None:
            self.extend_hashes(self)
        return (
            token_id == self.eos_token_id
            or token_id in self.stop_token_ids
            or len(token_ids) >= self.max_num_tokens
            or self.detects_repetition
        )

    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy: lower is sooner."""
        return (self.spec.priority, self.spec.arrival_time, self.spec.request_id)
