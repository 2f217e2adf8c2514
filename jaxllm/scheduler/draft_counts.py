"""Counts the drafts of speculative decoding and those that were accepted."""

import itertools


class DraftCounts:
    """Totals since the start, under the names of `SchedulerStats`."""

    def __init__(self, max_drafts: int):
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self._rows_by_accepted = [0] * (max_drafts + 1)
        """How many rows of steps had so many accepted drafts."""

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Count a row of a step; without drafts it does not count."""
        if num_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            self._rows_by_accepted[num_accepted] += 1

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """How often the draft at each position was accepted."""
        return tuple(itertools.accumulate(reversed(self._rows_by_accepted[1:])))[::-1]

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts of all positions."""
        return sum(accepted * rows for accepted, rows in enumerate(self._rows_by_accepted))
