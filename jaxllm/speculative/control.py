"""How many drafts each request gets: as many as its recent ones were worth, and none where a batch gains nothing by them."""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxllm.request import Request
from jaxllm.scheduler.draft_counts import DraftCounts
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import ModelRunnerOutput

_WEIGHT_OF_REQUEST, _WEIGHT_OF_ALL = 0.2, 0.02
"""Weight of the latest step in the mean number of drafts that were right: of one request, and of all."""
_STEPS_BETWEEN_TRIALS, _STEPS_OF_TRIAL = 300, 8
"""While drafts do not pay, so many steps go by without, and then so many have some again."""
_TIMES, _ENOUGH_TIMES = 8, 3
"""Latest times kept of steps of a size, and how many of them are enough to compare."""
_STEPS_UNTIL_REFRESH = 2000
"""After so many steps with drafts, steps without are timed anew: contexts have grown, or other requests have come."""


@dataclass
class _Mean:
    """A mean in which earlier values count less and less."""

    value: float

    def add(self, value: float, weight: float) -> None:
        self.value += weight * (value - self.value)


class _Times:
    """How long steps of a number of rows took of late, with and without drafts."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=_TIMES)
        self.wide: deque[float] = deque(maxlen=_TIMES)
        self.num_wide = 0
        """Steps with drafts since those without were timed."""

    @property
    def are_missing(self) -> bool:
        """Whether steps without drafts must be timed."""
        return len(self.plain) < _ENOUGH_TIMES and len(self.wide) >= _ENOUGH_TIMES

    @property
    def cost(self) -> float | None:
        """How many times as long a step takes with drafts; None if that is not known yet."""
        if min(len(self.plain), len(self.wide)) < _ENOUGH_TIMES:
            return None
        return statistics.median(self.wide) / statistics.median(self.plain)

    def add(self, seconds: float, *, has_drafts: bool) -> None:
        if not has_drafts:
            self.plain.append(seconds)
            return
        self.wide.append(seconds)
        self.num_wide += 1
        if self.num_wide >= _STEPS_UNTIL_REFRESH:
            self.plain.clear()
            self.num_wide = 0


class AdaptiveControl:
    """Gives a request about twice as many drafts as were right of late, at least one.

    Steps are timed with and without drafts, by powers of two of their rows. Where a step takes c times as long with drafts, they pay
    if a request gets more than c tokens in a step.
    """

    def __init__(self, num_drafts: int, num_lookahead: int, *, most_drafts: Callable[[int], int], are_checked: bool = True):
        """most_drafts: what the options allow at a number of running requests. are_checked: only those that the target draws too are
        accepted."""
        self.num_drafts = num_drafts
        self.num_lookahead = num_lookahead
        self._most_drafts = most_drafts
        self._are_checked = are_checked
        self._of_request: dict[str, _Mean] = {}
        self._of_all = _Mean(num_drafts)
        self._times: defaultdict[int, _Times] = defaultdict(_Times)
        self._num_idle = 0
        self.num_now = num_drafts
        """See DraftControl."""
        self.counts = DraftCounts(num_drafts)
        """See DraftControl."""

    def most(self, num_running: int) -> int:
        """See DraftControl."""
        self.num_now = self._choose(num_running)
        return self.num_now

    def _choose(self, num_running: int) -> int:
        allowed = min(self.num_drafts, self._most_drafts(num_running))
        if not allowed or not num_running:
            return allowed
        times = self._times[num_running.bit_length()]
        if times.are_missing:
            return 0
        cost = times.cost
        if cost is None or 1 + self._of_all.value >= cost:
            self._num_idle = 0
            return allowed
        self._num_idle += 1
        is_trial = self._num_idle % (_STEPS_BETWEEN_TRIALS + _STEPS_OF_TRIAL) >= _STEPS_BETWEEN_TRIALS
        return allowed if is_trial else 0

    def note_seconds(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """See DraftControl."""
        self._times[num_rows.bit_length()].add(seconds, has_drafts=num_drafts > 0)

    def of(self, request: Request) -> int:
        """See DraftControl."""
        if request.matcher is not None and not self._are_checked:
            return 0  # the output would leave its grammar
        asked = request.sampling_params.num_speculative_tokens
        mean = self._of_request.get(request.request_id)
        wanted = self.num_drafts if mean is None else 1 + round(2 * mean.value)
        return wanted if asked is None else min(wanted, asked)

    def note(self, shares: Iterable[Share], result: ModelRunnerOutput) -> None:
        """See DraftControl."""
        for _, _, row in shares:
            if not row.num_drafts:
                continue
            sampled = result.sampled_token_ids.get(row.request_id)
            if sampled is None:
                continue
            num_right = len(sampled) - 1
            self.counts.note(result.num_drafts.get(row.request_id, row.num_drafts), num_right)
            mean = self._of_request.get(row.request_id)
            if mean is None:
                mean = self._of_request[row.request_id] = _Mean(row.num_drafts)
            mean.add(num_right, _WEIGHT_OF_REQUEST)
            self._of_all.add(num_right, _WEIGHT_OF_ALL)

    def forget(self, request_id: str) -> None:
        """See DraftControl."""
        self._of_request.pop(request_id, None)
