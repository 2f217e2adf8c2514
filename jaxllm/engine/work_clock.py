"""Measures the time with work, and the part of it without a step in flight."""

import time
from collections.abc import Callable


class WorkClock:
    """Call `note` at each change; the time since the last call counts for the previous state.

    Idle time is a lower bound: the device may finish a step some time before the host notices. Work time minus the time that
    the host waited for the device is an upper bound.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since = clock()
        self._has_work = self._in_flight = False
        self._work_seconds = self._idle_seconds = 0.0

    def note(self, *, has_work: bool, in_flight: bool) -> None:
        """Record whether there is work and whether a step is in flight from now on."""
        now = self._clock()
        if self._has_work:
            self._work_seconds += now - self._since
            if not self._in_flight:
                self._idle_seconds += now - self._since
        self._since, self._has_work, self._in_flight = now, has_work, in_flight

    def totals(self) -> tuple[float, float]:
        """Seconds with work, and those of them without a step in flight, until now."""
        self.note(has_work=self._has_work, in_flight=self._in_flight)
        return self._work_seconds, self._idle_seconds
