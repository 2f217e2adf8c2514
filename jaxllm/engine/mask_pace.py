"""Chooses whether requests under a grammar run in the same steps as others, or leave steps to the others while they wait for masks.

Together, every request gets a token in every step. The others run ahead undisturbed as long as masks are ready before the forward pass
that they are for is over; masks that take longer hold up all requests. Apart, the others run ahead whatever masks take, but a request
under a grammar is in every second step only; of three steps in flight, in every third.

Tokens of a request in the time of a forward pass, simulated with two steps in flight:

| masks take (forward passes) | together | apart: others, under a grammar |
|---|---|---|
| 0.5 | 0.99 | 1.00, 0.50 |
| 1   | 0.88 | 1.00, 0.50 |
| 1.5 | 0.61 | 0.99, 0.50 |
| 2.5 | 0.38 | 0.75, 0.37 |
"""

import statistics
from collections import deque

_STEPS_TOGETHER, _STEPS_APART = 8, 64
"""After so many steps in a row for whose masks the device waited, so many steps are apart. Then it is tried together again."""
_LEAST_GAIN = 4 / 3
"""How many times as long steps must take together: less, and as many requests of both kinds get more tokens together."""
_STEPS_UNTIL_RETRY = 2000
"""Steps together after which it is tried apart again, if that gained too little."""


class MaskPace:
    """Learns from the steps that run."""

    def __init__(self) -> None:
        self.is_apart = False
        self._together: deque[float] = deque(maxlen=_STEPS_TOGETHER)
        """Seconds of the latest steps, if the device waited for the masks of all of them."""
        self._apart: list[float] = []
        self._num_until_retry = 0

    def note(self, seconds: float, *, is_late: bool | None) -> None:
        """Record a step that began when the step before it ended. is_late: whether the device waited for its masks, which held up
        requests without any; None if there were no masks, or no such requests."""
        if self.is_apart:
            self._apart.append(seconds)
            if len(self._apart) == _STEPS_APART:
                gain = statistics.median(self._together) / statistics.fmean(self._apart)
                self._num_until_retry = 0 if gain >= _LEAST_GAIN else _STEPS_UNTIL_RETRY
                self.is_apart = False
                self._together.clear()
                self._apart.clear()
        elif self._num_until_retry:
            self._num_until_retry -= 1
        elif is_late:
            self._together.append(seconds)
            self.is_apart = len(self._together) == _STEPS_TOGETHER
        elif is_late is False:
            self._together.clear()
