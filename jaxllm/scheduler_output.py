"""The interface between scheduler and runner: a step's plan (`SchedulerOutput`) and its result (`ModelRunnerOutput`)."""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import PromptItem
from jaxllm.sampling_params import SamplingParams

NO_TOKEN = -1
"""In place of a token: the request's constraints allow no token."""
NOT_FINITE = -3
"""In place of a token: its logit is NaN or infinite, as in the whole row after an overflow in the model."""

NO_ADAPTER = -1
"""In place of the slot of an adapter."""


@dataclass(frozen=True)
class NewRequestData:
    """A request that gets a row in this step: new, or resumed after preemption. Sent whole, once."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, and the outputs so far if resumed."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: list[int]
    """Its block tables, one for each group of layers and all of the same length, one after the other."""
    num_computed_tokens: int
    num_cached_tokens: int
    """Tokens at the start whose keys and values are in shared blocks already; never written again. It exceeds
    num_computed_tokens by one when the whole prompt was cached and only its last token is computed again."""
    is_masked: bool = False
    """Whether a grammar restricts its tokens."""
    pooling_params: PoolingParams | None = None
    adapter_slot: int = NO_ADAPTER
    """The slot on the device of the request's adapter."""
    items: tuple[PromptItem, ...] = ()
    """The items of its prompt, without their payloads: `EncodeItem` has those."""
    second_text_start: int | None = None
    """See `EngineCoreRequest`."""


class RowStep(NamedTuple):
    """One request's part of a step. A tuple, because one is made for every request in every step."""

    request_id: str
    start: int
    """Position of its first token; an upper bound while drafts of the request are in flight. The device knows it exactly."""
    num_tokens: int
    """Drafts included."""
    num_drafts: int
    """How many of them, at the end, are drafts: the device has their ids."""
    new_blocks: list[int]
    """Appended to the request's block tables: the blocks of the first table, as many of the second, and so on. Empty for a new
    request, whose tables come whole."""


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. The new requests' parts are the last of `rows`, in the same order."""

    new_requests: list[NewRequestData]
    rows: list[RowStep]
    """In scheduling order: running requests first."""
    num_tokens: int
    """Tokens of all rows."""
    finished_request_ids: list[str]
    """Requests that ended since the last step. Free their rows before admitting new requests."""
    preempted_request_ids: list[str]
    """Requests that lost their blocks and rows in this step."""
    step_id: int = 0
    masked_request_ids: tuple[str, ...] = ()
    """Requests that sample under a grammar in this step, or whose thinking may have used up its budget. The step waits for their
    masks, which need their last tokens."""
    num_drafts: int = 0
    """Most drafts of a row, in this step and proposed for the next."""
    ops: tuple[AnyDeviceOp, ...] = ()
    """Run in order before the step, after all steps before. A plan may have operations and no rows."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Number of tokens by request. Too slow for the step loop."""
        return {row.request_id: row.num_tokens for row in self.rows}


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of consecutive tokens. Column 0 is the token itself, then the likeliest in order of rank."""

    token_ids: np.ndarray
    """int32[num_tokens, 1 + k]"""
    logprobs: np.ndarray
    """float32[num_tokens, 1 + k]"""
    ranks: np.ndarray
    """int32[num_tokens]: rank of the token itself, from 1."""


@dataclass(frozen=True)
class ModelRunnerOutput:
    """The results of a step."""

    sampled_token_ids: dict[str, list[int]]
    """New tokens by request, several if drafts were right; a request whose prefill is not done yet is absent."""
    num_drafts: dict[str, int] = field(default_factory=dict)
    """Drafts that the step checked, by request; empty without a drafter."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """For requests that asked, aligned with their new tokens."""
    prompt_logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """For requests that asked, once, when their prefill is done: positions 1 … num_prompt_tokens-1."""
    pooled: dict[str, np.ndarray] = field(default_factory=dict)
    """For pooling requests whose prompt is computed: `EngineCoreOutput.pooled`."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed alone in this step, with the reason."""
    not_finite: set[str] = field(default_factory=set)
    """Requests for which the model computed logits or vectors that are not finite numbers."""
    expert_counts: dict[int, np.ndarray] = field(default_factory=dict)
    """After `TakeCounts`: the tokens of each expert, integers, by layer with a mixture; behind the last expert there may be zeros."""

    def add(self, other: "ModelRunnerOutput") -> None:
        """Add the results of other requests in the same step, or of other devices."""
        for each in fields(self):
            if each.name != "expert_counts":
                getattr(self, each.name).update(getattr(other, each.name))
        self.add_counts(other.expert_counts)

    def add_counts(self, counts: dict[int, np.ndarray]) -> None:
        """Add tokens of experts."""
        for layer, tokens_E in counts.items():
            self.expert_counts[layer] = self.expert_counts.get(layer, 0) + tokens_E
