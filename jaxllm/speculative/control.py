"""How many drafts each request gets: as many as its recent ones were worth, and none where a batch gains nothing by them."""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxllm.request import Request
from jaxllm.scheduler.draft_control import levels
from jaxllm.scheduler.draft_counts import DraftCounts
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import ModelRunnerOutput

_WEIGHT_OF_REQUEST, _WEIGHT_OF_ALL = 0.2, 0.02
"""Weight of the latest step in means: of one request, and of all."""
_STEPS_BETWEEN_TRIALS, _STEPS_OF_TRIAL = 300, 8
"""While drafts do not pay, so many steps go by without, and then so many have some again."""
_TIMES, _ENOUGH_TIMES = 8, 3
"""Latest times kept of steps of a kind, and how many of them are enough to compare."""
_STEPS_TO_TIME = 20
"""At most so many steps are planned in order to be timed: those that compute prompts too are not timed."""
_STEPS_UNTIL_REFRESH = 2000
"""After so many steps, the kinds of steps that are not chosen are timed anew: contexts have grown, or other requests have come."""


@dataclass
class _Mean:
    """A mean in which earlier values count less and less."""

    value: float

    def add(self, value: float, weight: float) -> None:
        self.value += weight * (value - self.value)


class StepTimes:
    """How long steps of a number of rows took of late, by the most drafts of a row."""

    def __init__(self, levels: Iterable[int]):
        self._seconds = {level: deque[float](maxlen=_TIMES) for level in levels}
        self._num_asked = dict.fromkeys(self._seconds, 0)
        """Steps that were planned in order to be timed."""
        self._num_steps = 0

    def level_to_time(self) -> int | None:
        """Number of drafts that the next step must have to be timed; None if nothing is missing. The most drafts come first."""
        for level, seconds in self._seconds.items():
            if len(seconds) < _ENOUGH_TIMES and self._num_asked[level] < _STEPS_TO_TIME:
                self._num_asked[level] += 1
                return level
        return None

    def of(self, level: int) -> float | None:
        """Seconds of a step; None if that is not known yet."""
        seconds = self._seconds[level]
        return statistics.median(seconds) if len(seconds) >= _ENOUGH_TIMES else None

    def add(self, level: int, seconds: float) -> None:
        if level not in self._seconds:
            return  # the options allow other numbers of drafts at some sizes
        self._seconds[level].append(seconds)
        self._num_steps += 1
        if self._num_steps >= _STEPS_UNTIL_REFRESH:
            self._num_steps = 0
            for other in self._seconds.keys() - {level}:
                self._seconds[other].clear()
                self._num_asked[other] = 0


class AdaptiveControl:
    """Gives a request about twice as many drafts as were right of late, at least one, and in a step as many as pay.

    Steps are timed by the number of drafts that they have room for, and by powers of two of their rows. The number that brings the
    most tokens a second is chosen, given how often drafts were right of late, by their place.
    """

    def __init__(self, num_drafts: int, num_lookahead: int, *, most_drafts: Callable[[int], int], with_grammars: bool = True):
        """most_drafts: what the options allow at a number of running requests. with_grammars: whether requests under a grammar get
        drafts."""
        self.num_drafts = num_drafts
        self.num_lookahead = num_lookahead
        self._most_drafts = most_drafts
        self._with_grammars = with_grammars
        self.fits_rows = False
        """See DraftControl."""
        self._of_request: dict[str, _Mean] = {}
        self._by_place = [_Mean(1.0) for _ in range(num_drafts)]
        """How often a draft at each place was right, and all before it."""
        self._levels = (*reversed(levels(num_drafts)), 0)
        self._times = defaultdict[int, StepTimes](lambda: StepTimes(self._levels))
        self._num_idle = 0
        self.num_now = num_drafts
        """See DraftControl."""
        self.counts = DraftCounts(num_drafts)
        """See DraftControl."""

    def most(self, num_running: int, running: Sequence[Request] = ()) -> int:
        """See DraftControl."""
        self.num_now = self._choose(num_running)
        return self.num_now

    def _choose(self, num_running: int) -> int:
        allowed = min(self.num_drafts, self._most_drafts(num_running))
        if not allowed or not num_running:
            return allowed
        times = self._times[num_running.bit_length()]
        best = times.level_to_time()
        if best is None:
            best = max(self._levels, key=lambda level: self._tokens_per_second(times, level))
            self._num_idle = 0 if best else self._num_idle + 1
            if self._num_idle % (_STEPS_BETWEEN_TRIALS + _STEPS_OF_TRIAL) >= _STEPS_BETWEEN_TRIALS:
                best = allowed
        return min(best, allowed)

    def _tokens_per_second(self, times: StepTimes, level: int) -> float:
        """Tokens per second of a request; 0 for an untimed kind of step. If none was timed, the most drafts are chosen: they come first."""
        seconds = times.of(level)
        if seconds is None:
            return 0.0
        return (1 + sum(mean.value for mean in self._by_place[:level])) / seconds

    def note_seconds(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """See DraftControl."""
        self._times[num_rows.bit_length()].add(num_drafts, seconds)

    def of(self, request: Request) -> int:
        """See DraftControl."""
        if request.matcher is not None and not self._with_grammars:
            return 0
        asked = request.sampling_params.num_speculative_tokens
        mean = self._of_request.get(request.request_id)
        wanted = self.num_drafts if mean is None else 1 + round(2 * mean.value)
        return wanted if asked is None else min(wanted, asked)

    def note(self, shares: Iterable[Share], result: ModelRunnerOutput) -> None:
        """See DraftControl."""
        for request, _, row in shares:
            if not row.num_drafts or request.status.is_finished:
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
            for place in range(row.num_drafts):
                self._by_place[place].add(num_right > place, _WEIGHT_OF_ALL)

    def forget(self, request_id: str) -> None:
        """See DraftControl."""
        self._of_request.pop(request_id, None)
