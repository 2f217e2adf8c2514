"""Drafts that grammars have: the host finds the tokens that they force (`jaxllm.structured.forced_tokens`), no model proposes any."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.cache_spec import CacheSpec
from jaxllm.model_parts import Layer
from jaxllm.progress import Progress
from jaxllm.request import Request
from jaxllm.runner.drafter import Drafting
from jaxllm.scheduler.draft_counts import DraftCounts
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(frozen=True)
class GrammarDrafter:
    """Proposes nothing itself: see `Drafter.proposes`."""

    num_drafts: int
    num_lookahead: int = 0
    feature_layers: tuple[int, ...] = ()
    cache_specs: tuple[CacheSpec, ...] = ()
    model: nnx.Module | None = None
    layers: tuple[Layer, ...] = ()
    proposes: bool = False
    needs_history: bool = False
    is_drawn: bool = False
    accepts_by_ratio: bool = False
    synthetic_rates: tuple[float, ...] = ()

    @property
    def described(self) -> Mapping[str, Any]:
        """Nothing but the options."""
        return {}

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """There are no weights."""
        raise AssertionError("grammars have no weights")

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
    """Gives each request as many drafts as its grammar has for the step: nearly all are right, and steps have no others."""

    num_lookahead = 0
    fits_rows = True

    def __init__(self, num_drafts: int, *, most_drafts: Callable[[int], int]):
        """most_drafts: what the options allow at a number of running requests."""
        self.num_drafts = self.num_now = num_drafts
        self._most_drafts = most_drafts
        self.counts = DraftCounts(num_drafts)
        """See DraftControl."""

    def most(self, num_running: int) -> int:
        """See DraftControl."""
        self.num_now = min(self.num_drafts, self._most_drafts(num_running))
        return self.num_now

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
        """See DraftControl. How many drafts there are does not depend on it."""

    def forget(self, request_id: str) -> None:
        """See DraftControl. Nothing is kept."""
