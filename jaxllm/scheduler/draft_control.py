"""How many drafts each request computes in a step, as seen by the scheduler."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxllm.request import Request
from jaxllm.scheduler.draft_counts import DraftCounts
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import ModelRunnerOutput


def levels(num_drafts: int) -> tuple[int, ...]:
    """Limits of drafts per row that steps are compiled for, except 0, for at most `num_drafts`: half of them and all."""
    return (num_drafts,) if num_drafts < 3 else (-(-num_drafts // 2), num_drafts)


class DraftControl(Protocol):
    """Chooses numbers of drafts and learns from how many were right."""

    @property
    def counts(self) -> DraftCounts:
        """Drafts so far, and how many were right."""

    @property
    def num_now(self) -> int:
        """Most drafts of a request in the latest step."""

    @property
    def fits_rows(self) -> bool:
        """Whether a step has room for no more drafts than its requests compute: no drafter proposes others behind it."""

    @property
    def num_lookahead(self) -> int:
        """Positions behind the tokens of a step that the drafter writes to the cache."""

    def most(self, num_running: int, running: Sequence[Request] = ()) -> int:
        """Most drafts of a request in the next step, in which so many requests may run. Called once for each step.

        running: those that run now, if `fits_rows`."""

    def of(self, request: Request) -> int:
        """Most drafts of this request in the step that is planned."""

    def note(self, shares: Iterable[Share], result: ModelRunnerOutput) -> None:
        """Learn from a step."""

    def note_seconds(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn from how long a step took that computed no prompts. num_drafts: what `most` had allowed."""

    def forget(self, request_id: str) -> None:
        """A request has ended."""
