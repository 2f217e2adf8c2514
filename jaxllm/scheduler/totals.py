"""Counters of a scheduler since its start, for `SchedulerStats`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.observations import STEP_TOKENS, Observations
from jaxllm.request import Request
from jaxllm.scheduler.draft_control import DraftControl
from jaxllm.scheduler_output import NewRequestData

QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_queued_image_gb")


@dataclass
class Totals:
    """Counts since the start."""

    num_preemptions: int = 0
    num_not_finite: int = 0
    """Requests that ended because the model computed NaN or infinity for them."""
    num_rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUEUE_LIMITS, 0))
    """Rejected requests by the limit that was reached."""
    step_tokens: Observations = field(default_factory=lambda: Observations(STEP_TOKENS))
    _first: list[int] = field(default_factory=lambda: [0, 0])
    _resumed: list[int] = field(default_factory=lambda: [0, 0])
    """[queried, found] tokens of the prefix cache, of first admissions and of those after preemption."""

    _external: list[int] = field(default_factory=lambda: [0, 0])
    """[queried, found] tokens of tiers."""

    def note_loaded(self, request: Request, data: NewRequestData, block_size: int) -> None:
        """Count the admission of a request that was looked up in tiers. The first one tells the request what they loaded for it: what they
        loaded for others meanwhile counts as cached."""
        before, request.num_cached_before_load = request.num_cached_before_load, None
        blocks, request.num_loaded_blocks = request.num_loaded_blocks, {}
        num_more = 0 if before is None else max(0, data.num_cached_tokens - before)
        num_loaded = min(num_more, block_size * sum(blocks.values()))
        self._external[0] += request.num_tokens - data.num_cached_tokens + num_loaded
        self._external[1] += num_loaded
        if num_loaded and request.num_cached_tokens < 0:
            request.loaded_tokens = _shares(num_loaded, blocks)

    def note_prefix(self, request: Request, data: NewRequestData) -> None:
        """Count the admission of a request that was looked up in the prefix cache."""
        totals = self._resumed if request.num_preemptions else self._first
        totals[0] += request.num_tokens
        totals[1] += data.num_cached_tokens

    def stats(self, drafts: DraftControl | None) -> dict[str, Any]:
        """The fields of `SchedulerStats` that these and a drafter's counts fill."""
        fields: dict[str, Any] = {
            "num_preemptions": self.num_preemptions,
            "prefix_cache_queries": self._first[0],
            "prefix_cache_hits": self._first[1],
            "resumed_prefix_cache_queries": self._resumed[0],
            "resumed_prefix_cache_hits": self._resumed[1],
            "external_prefix_cache_queries": self._external[0],
            "external_prefix_cache_hits": self._external[1],
            "num_rejected_for_requests": self.num_rejected["max_num_queued_reqs"],
            "num_rejected_for_tokens": self.num_rejected["max_num_queued_tokens"],
            "num_rejected_for_images": self.num_rejected["max_queued_image_gb"],
            "num_not_finite": self.num_not_finite,
            "step_token_counts": tuple(self.step_tokens.counts),
            "num_step_tokens": int(self.step_tokens.sum),
        }
        return fields if drafts is None else fields | draft_stats(drafts)


def _shares(num_tokens: int, num_blocks: Mapping[str, int]) -> dict[str, int]:
    """Tokens that were loaded, by source, where the blocks that were loaded for them came from these."""
    found, num_before, num_all = {}, 0, sum(num_blocks.values())
    for source, count in num_blocks.items():
        found[source] = num_tokens * (num_before + count) // num_all - num_tokens * num_before // num_all
        num_before += count
    return found


def draft_stats(drafts: DraftControl) -> dict[str, Any]:
    """The fields of `SchedulerStats` that a drafter's counts fill."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position")
    return {name: getattr(drafts.counts, name) for name in names} | {"num_speculative_tokens": drafts.num_now}
