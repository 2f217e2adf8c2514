"""The request that an API server sends to the engine core (`EngineCoreRequest`) and its mutable state inside it (`Request`)."""

import enum
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from jaxllm import clock
from jaxllm.errors import InvalidRequestError
from jaxllm.pooling_params import PoolingParams
from jaxllm.request_options import NO_OPTIONS, RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.thinking import ThinkingBudget, ThinkingSection


class FinishReason(enum.StrEnum):
    """Why a request ended, as users see it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class RequestStatus(enum.IntEnum):
    """The state of a request. All members after PREEMPTED are finished states."""

    WAITING = 0
    WAITING_FOR_BLOCKS = 1
    """Waits, with its place in the queue, while a cache tier loads blocks of its prefix."""
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
    """The kind of error that ended a request with the finish reason "error"."""

    INTERNAL = "internal"
    """A failure in the engine, in this request or in the step that computed it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device had too little memory for the request, in steps of any size."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It waited longer than its `queue_timeout_seconds`."""
    TIMEOUT = "timeout"
    """It was not done after its `timeout_seconds`."""
    CONSTRAINT = "constraint"
    """The request's constraints leave no token to continue with."""
    NOT_FINITE = "not_finite"
    """The model computed NaN or infinity for it."""
    ADAPTER = "adapter"
    """Its adapter could not be loaded, or was removed."""
    KV_TRANSFER = "kv_transfer"
    """A prefill engine did not deliver the blocks of its prompt, and they are not computed instead (kv_load_failure_policy)."""


@dataclass(frozen=True)
class Grammar:
    """A grammar that has been compiled on trial, within the limits of time and memory."""

    text: str
    """The grammar in the form that llguidance compiles."""
    num_bytes: int = 0
    """Memory of the compiled grammar, in bytes."""
    start_after_token_ids: tuple[int, ...] | None = None
    """If set, the grammar applies only after this run of output tokens."""


class OutputMatcher(Protocol):
    """Tracks the state of an output in its grammar."""

    is_done: bool
    """Whether the output is complete without an EOS token."""
    num_next_drafts: int
    """How many drafts the grammar has for the step behind the latest one that samples."""

    def advance(self, token_id: int) -> None:
        """Advance by one token. Raises GrammarError if the grammar does not allow it."""
        ...


class RequestAdapter(Protocol):
    """The adapter of a request, in the engine core."""

    @property
    def cache_key(self) -> str:
        """Differs between adapters whose keys and values differ, in all engines of the model."""

    number: int
    """Differs between the adapters of an engine."""
    slot: int
    """Its slot on the device, while a request that has it is admitted."""


class PromptItem(msgspec.Struct, frozen=True):
    """A part of a prompt that is more than its token ids, e.g. an image. It stands at placeholder tokens of the prompt."""

    kind: str
    """Kind of item: it is computed by the room of the scheduler that lists this kind."""
    content_hash: bytes
    """Equal for items with equal keys and values only: it covers all that shapes them, settings of their processing included."""
    position: int
    """Position of its first token in the prompt."""
    num_tokens: int
    payload: bytes = b""
    """Its content, in a form that only what computes it reads."""
    grid: tuple[int, int, int] | None = None
    """Tokens of an image or video in time, height and width. Models with three-dimensional positions compute positions from it.
    None: the tokens are a plain sequence."""
    embedding_runs: tuple[tuple[int, int], ...] = ()
    """(offset, count) of each run of its tokens that an embedding replaces; the others keep those of their ids. Empty: all are replaced."""

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.position + self.num_tokens

    @property
    def num_embeddings(self) -> int:
        """How many of its tokens an embedding replaces."""
        return sum(count for _, count in self.embedding_runs) if self.embedding_runs else self.num_tokens


@dataclass(frozen=True, kw_only=True)
class EngineCoreRequest:
    """One validated sequence to generate or to pool, in token ids. The API server sends it to the engine core."""

    request_id: str
    prompt_token_ids: list[int]
    items: tuple[PromptItem, ...] = ()
    """Items at some of these tokens, in order, without overlap."""
    sampling_params: SamplingParams
    """Here n is 1 (the API server makes a request per answer), and max_tokens and the seed are set. Unused with pooling_params."""
    pooling_params: PoolingParams | None = None
    """If set, nothing is generated and the request ends when its prompt is computed. All fields in it are set."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the request unless sampling_params.ignore_eos; the first is the tokenizer's EOS."""
    arrival_time: float = field(default_factory=clock.now)
    options: RequestOptions = NO_OPTIONS
    grammar: Grammar | None = None
    """The grammar made from sampling_params.structured_outputs, which is not set here."""
    thinking_budget: ThinkingBudget | None = None
    """The budget made from sampling_params.thinking_token_budget, which is not set here, for this prompt."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens of its output that another engine has drawn: it goes on behind them, and reports those that follow."""
    awaits_first_token: bool = False
    """Whether another engine draws its first token now: it does not run before `SteppedCore.continue_request` says which."""
    second_text_start: int | None = None
    """In a prompt of two texts for an encoder: position of the first token of the type 1, which all behind it have; None: there is none."""

    def __post_init__(self) -> None:
        end = 0
        for item in self.items:
            if not end <= item.position < item.end <= len(self.prompt_token_ids):
                raise InvalidRequestError(
                    f"prompt has {len(self.prompt_token_ids)} tokens and an item of kind {item.kind!r} at {item.position} to "
                    f"{item.end}; items must lie inside it in order, without overlap, each with at least 1 token",
                    "prompt",
                )
            end = item.end

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether a cached prefix of the prompt may be used."""
        if self.pooling_params is not None:
            return not self.pooling_params.skip_reading_prefix_cache
        # Prompt logprobs need the hidden state of every prompt token, so no prompt token may come from the cache.
        return not self.sampling_params.skip_reading_prefix_cache and self.sampling_params.prompt_logprobs is None


@dataclass(eq=False)
class Request:
    """A request inside the engine core, from admission to finish. Only the scheduler changes it."""

    spec: EngineCoreRequest
    request_id: str = field(init=False)
    options: RequestOptions = field(init=False)
    sampling_params: SamplingParams = field(init=False)
    pooling_params: PoolingParams | None = field(init=False)
    eos_token_id: int | None = field(init=False)
    """The tokenizer's EOS token; None if there is none or it is ignored."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Every other token that ends the request."""
    detects_repetition: bool = field(init=False)
    skip_reading_prefix_cache: bool = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Limit of prompt and output together, in tokens; the scheduler lowers it to the model's limit."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache or will be after the steps in flight, if all their drafts are right."""
    num_output_placeholders: int = 0
    """Tokens that steps in flight will sample, if all their drafts are right."""
    last_step_id: int = 0
    """The latest planned step that computes tokens of it."""
    num_drafts_in_flight: int = 0
    """Drafts in steps in flight."""
    may_have_drafts: bool = False
    """Whether drafts are proposed behind the latest planned step of the request."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before it."""
    num_found_blocks: int = sys.maxsize
    """Fewest blocks that were found in the prefix cache at an admission. It computed none of them."""
    most_found_blocks: int = 0
    """Most blocks that were found there at an admission."""
    may_try_again: bool = True
    """Whether it computes all itself if it draws NaN behind blocks that it had found; not a second time."""
    admission_step_id: int = 0
    """The step of its latest admission."""
    stored_states: set[int] = field(default_factory=set)
    """Positions before which its states by row were put into blocks."""
    accepted_counts: list[int] = field(default_factory=list)
    """Steps that have verified drafts, by the number of drafts that they accepted."""
    num_draft_tokens: int = 0
    """Drafts that they verified."""
    num_preemptions: int = 0
    queued_at: float = 0.0
    """When the scheduler received the request, on the monotonic clock."""
    scheduled_at: float = 0.0
    """When its first step was planned."""
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None
    matcher: OutputMatcher | None = None
    """The matcher of a request with a grammar, once the grammar is compiled. It has consumed all output tokens."""
    adapter: RequestAdapter | None = None
    """The adapter that computes a request whose options name one."""
    thinking: ThinkingSection | None = field(init=False)
    """The thinking section of a request with a budget. It has consumed all output tokens."""
    block_hashes: list[bytes] = field(default_factory=list)
    """One hash per full block of token_ids, kept up to date by `extend_hashes`."""
    extend_hashes: Callable[["Request"], None] | None = None
    loads_blocks: bool = True
    """Whether cache tiers may load blocks of it; not after a load that failed."""
    num_cached_before_load: int | None = None
    """Tokens that the pool had of it when its load began, until it is admitted; None: there was no load."""
    num_loaded_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks that its loads have brought, by their source, until it is admitted."""
    loaded_tokens: dict[str, int] | None = None
    """The part of `num_cached_tokens` that tiers loaded, by source; None: there is none."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters for the decode engine that gets its prompt, whose blocks are kept. Set once it has ended."""
    is_announced: bool = False
    """Whether tiers were asked to tell such parameters early."""
    awaits_first_token: bool = field(init=False)
    """See EngineCoreRequest; not once it is there, or will not come."""

    def __post_init__(self) -> None:
        spec, params = self.spec, self.spec.sampling_params
        self.request_id = spec.request_id
        self.options = spec.options
        self.sampling_params = params
        self.pooling_params = pooling = spec.pooling_params
        eos = () if params.ignore_eos else spec.eos_token_ids
        self.eos_token_id = eos[0] if eos else None
        self.stop_token_ids = frozenset((*eos[1:], *(params.stop_token_ids or ())))
        self.detects_repetition = bool(params.repetition_detection)
        self.skip_reading_prefix_cache = not spec.reads_prefix_cache
        self.thinking = None if spec.thinking_budget is None else ThinkingSection(spec.thinking_budget)
        self.awaits_first_token = spec.awaits_first_token
        self.token_ids = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = sys.maxsize if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        if pooling is not None:
            self.max_num_tokens = self.num_prompt_tokens + 1  # counts the vector as one token, which is never computed
        if self.extend_hashes is not None:
            self.extend_hashes(self)
        if spec.output_token_ids:
            self.take_outputs(spec.output_token_ids)

    @property
    def is_kept_for_decode(self) -> bool:
        """Whether another engine computes its answer with the blocks of this one."""
        return self.options.kv_transfer is not None and self.options.kv_transfer.keep_for_decode

    @property
    def waiting_status(self) -> RequestStatus:
        """Its status while it waits for admission."""
        return RequestStatus.PREEMPTED if self.num_preemptions else RequestStatus.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens. Too slow for the step loop."""
        return self.token_ids[self.num_prompt_tokens :]

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a step that verified drafts."""
        counts = self.accepted_counts
        counts += [0] * (num_drafts + 1 - len(counts))
        counts[num_accepted] += 1
        self.num_draft_tokens += num_drafts

    def take_outputs(self, token_ids: Iterable[int]) -> None:
        """Go on behind output tokens that another engine has drawn, none of which ends the request. Raises GrammarError."""
        self.awaits_first_token = False
        for token_id in token_ids:
            if self.matcher is not None:
                self.matcher.advance(token_id)
            if self.thinking is not None:
                self.thinking.advance(token_id)
            self.append_output(token_id)

    def append_output(self, token_id: int) -> bool:
        """Append one sampled token. Returns whether it can end the request; if not, `check_stop` need not be called."""
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
        return (self.options.priority, self.spec.arrival_time, self.spec.request_id)
