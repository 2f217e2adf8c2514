"""Selects the sampling program of a request. Does not import JAX, so the batch builder can use it before any array exists."""

import enum

from jaxllm.sampling_params import SamplingParams


class Variant(enum.IntEnum):
    """The sampling programs, each able to do all that the lower ones do: a batch runs the highest that a request needs."""

    GREEDY = 0
    """Likeliest token."""
    RANDOM = 1
    """Temperature, min_p, top_k, top_p."""
    MASKED = 2
    """Variant with a mask of the tokens that may be drawn."""
    FULL = 3
    """Everything, with per-request state on the device."""


class StateUse(enum.IntEnum):
    """Demands of a request on the SamplingState; each includes the lower ones."""

    NONE = 0
    PENALTIES = 1
    """Counts of its tokens, for `stages.PENALTIES`."""
    ALL = 2


def variant_of(params: SamplingParams, *, full_logprobs: bool = False) -> Variant:
    """The lowest program that serves a request. `full_logprobs`: FULL alone reports logprobs, as it must with logprobs_mode
    processed_*."""
    if needs_state(params) or params.top_n_sigma > 0 or (full_logprobs and needs_logprobs(params)):
        return Variant.FULL
    return Variant.GREEDY if params.is_greedy else Variant.RANDOM


def needs_state(params: SamplingParams) -> bool:
    """Whether a request must be admitted to the SamplingState."""
    return state_use(params) != StateUse.NONE


def state_use(params: SamplingParams) -> StateUse:
    """The demands of a request on the SamplingState."""
    if (
        params.min_tokens > 0
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.bad_words_token_ids
        or params.extra_args
    ):
        return StateUse.ALL
    if params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0:
        return StateUse.PENALTIES
    return StateUse.NONE


def needs_logprobs(params: SamplingParams) -> bool:
    """Whether the request asks for logprobs of output tokens (prompt logprobs do not count)."""
    return params.logprobs is not None or params.logprob_token_ids is not None
