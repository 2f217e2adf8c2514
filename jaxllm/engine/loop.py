"""The loop in which scheduler and runner meet: plans the next step while one is on its way. Knows no JAX."""

import contextlib
import time
from collections import deque
from typing import Protocol

from jaxllm.engine.work_clock import WorkClock
from jaxllm.outputs import EngineCoreOutput
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput


class PendingOutput(Protocol):
    """A dispatched step."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step."""
        ...


class Runner(Protocol):
    """What the loop needs of a runner."""

    def dispatch(self, plan: SchedulerOutput) -> PendingOutput:
        """Start a step without waiting."""
        ...

    def start_over(self) -> None:
        """Have no rows and empty caches, whatever failed before. Raises if the device cannot go on."""
        ...


class StepLoop:
    """Schedules, dispatches and reads steps in order. With two in flight, step N+1 is dispatched before the tokens of step N are read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, max_in_flight: int):
        self.scheduler = scheduler
        self.runner = runner
        self.max_in_flight = max_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        self.working_on: SchedulerOutput | None = None
        """The step that is dispatched or read; after an error the one that failed. None while planning."""
        self._news: list[EngineCoreOutput] = []
        self.wait_seconds = 0.0
        """Time spent waiting for the device in all."""
        self.work_clock = WorkClock()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Keep the device busy, then return the news of the oldest step in flight (nothing if there was none)."""
        if not self._in_flight:
            self.note_work()
        while len(self._in_flight) < self.max_in_flight and self.scheduler.has_requests():
            self.working_on = None
            self.working_on = plan = self.scheduler.schedule()
            if plan.total_num_scheduled_tokens == 0:
                break
            self._in_flight.append((plan, self.runner.dispatch(plan)))
            if len(self._in_flight) == 1:
                self.note_work()
        if not self._in_flight:
            return []
        plan, pending = self._in_flight[0]
        self.working_on = plan
        start = time.perf_counter()
        result = pending.result()
        self.wait_seconds += time.perf_counter() - start
        self._in_flight.popleft()  # only now: a wait that was interrupted is still to come
        self._news += self.scheduler.update_from_output(plan, result)
        if not self._in_flight:
            self.note_work()
        return self.take_news()

    def take_news(self) -> list[EngineCoreOutput]:
        """What was read of steps and not told yet. After an error too: the tokens count, so they must be told."""
        news, self._news = self._news, []
        return news

    def note_work(self) -> None:
        """Tell the clock whether there is work and whether the device has any of it. Call when requests end outside a step."""
        self.work_clock.note(has_work=self.has_work, in_flight=bool(self._in_flight))

    def forget(self) -> None:
        """Drop the steps in flight, after the device is through with them. What they bring, errors too, is nobody's any more."""
        while self._in_flight:
            _, pending = self._in_flight.popleft()
            with contextlib.suppress(Exception):
                pending.result()

    def start_over(self) -> None:
        """Compute every request again, up to where it is, after a failure that may have left anything half done.

        Raises what keeps the device from going on.
        """
        self.forget()
        self.scheduler.start_over()
        self.runner.start_over()
