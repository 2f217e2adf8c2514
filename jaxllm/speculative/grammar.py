"""Drafts that grammars have: the host finds the tokens that they force (`jaxllm.structured.forced_tokens`), no model proposes any."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.request import Request
from jaxllm.runner.drafter import Drafting
from jaxllm.scheduler.draft_control import levels
from jaxllm.scheduler.draft_counts import DraftCounts
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import ModelRunnerOutput
from jaxllm.speculative.control import StepTimes
from jaxllm.speculative.weightless import WeightlessDrafter


@dataclass(frozen=True)
class GrammarDrafter(WeightlessDrafter):
    """Proposes nothing itself: see `Drafter.proposes`."""

    num_drafts: int
    proposes: bool = False
    needs_history: bool = False
    accepts_by_ratio: bool = False
    synthetic_rates: tuple[float, ...] = ()

    def new_state(self, num_rows: int, max_model_len: int) -> None:
        """Nothing is kept."""

    def show(self, state: None, row: jax.Array, position: jax.Array, token_ids_C: jax.Array) -> None:
        """See Drafter."""
        raise AssertionError("no history is wanted")

    def follow(self, model: Any, state: None, drafting: Drafting) -> None:
        """See Drafter."""
        raise AssertionError("nothing is proposed")

    def propose(self, model: Any, state: None, drafting: Drafting) -> tuple[None, jax.Array]:
        """See Drafter."""
        raise AssertionError("nothing is proposed")


class GrammarControl:
    """Gives each request as many drafts as its grammar has for the step, where they pay: nearly all are right, and steps have no others.

    A step with drafts takes longer, by all its rows. If few of them have drafts, it does without, until more do or a row has more.
    """

    num_lookahead = 0
    fits_rows = True

    def __init__(self, num_drafts: int, *, most_drafts: Callable[[int], int]):
        """most_drafts: what the options allow at a number of running requests."""
        self.num_drafts = self.num_now = num_drafts
        self._most_drafts = most_drafts
        self._levels = (*reversed(levels(num_drafts)), 0)
        self._times = defaultdict[int, StepTimes](lambda: StepTimes(self._levels))
        self.counts = DraftCounts(num_drafts)
        """See DraftControl."""

    def most(self, num_running: int, running: Sequence[Request] = ()) -> int:
        """See DraftControl."""
        allowed = min(self.num_drafts, self._most_drafts(num_running))
        found = [min(allowed, self.of(request)) for request in running if request.may_have_drafts]
        self.num_now = allowed if self._pays(num_running, found) else 0
        return self.num_now

    def _pays(self, num_running: int, found: Sequence[int]) -> bool:
        """Whether a step with these drafts of each request gives more tokens in its time than one without. If unknown, it is tried."""
        times = self._times[num_running.bit_length()]
        without, with_drafts = times.of(0), times.of(self._level(max(found, default=0)))
        if without is None or with_drafts is None:
            return True
        return (num_running + sum(found)) * without > num_running * with_drafts

    def _level(self, num_drafts: int) -> int:
        """The number of drafts that a step with so many has room for."""
        return min(level for level in self._levels if level >= num_drafts)

    def of(self, request: Request) -> int:
        """See DraftControl."""
        asked = request.sampling_params.num_speculative_tokens
        found = 0 if request.matcher is None else request.matcher.num_next_drafts
        return found if asked is None else min(found, asked)

    def note(self, shares: Iterable[Share], result: ModelRunnerOutput) -> None:
        """See DraftControl. A request whose last token was not the expected one had no drafts."""
        for request, _, row in shares:
            sampled = result.sampled_token_ids.get(row.request_id)
            if row.num_drafts and sampled is not None and not request.status.is_finished:
                self.counts.note(result.num_drafts.get(row.request_id, row.num_drafts), len(sampled) - 1)

    def note_seconds(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """See DraftControl."""
        self._times[num_rows.bit_length()].add(self._level(num_drafts), seconds)

    def forget(self, request_id: str) -> None:
        """See DraftControl. Nothing is kept."""
