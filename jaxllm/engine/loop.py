"""Runs scheduler and executor in a loop: plans the next step while earlier ones are in flight. Does not import JAX."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxllm.engine import masks
from jaxllm.engine.mask_pace import MaskPace
from jaxllm.engine.op_queue import OpQueue
from jaxllm.engine.step_times import StepTimes
from jaxllm.engine.work_clock import WorkClock
from jaxllm.outputs import EngineCoreOutput
from jaxllm.scheduler.interface import AnyScheduler
from jaxllm.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from jaxllm.engine.executor import Executor, PendingStep

LONG_STEP_SECONDS = 0.0035
"""Steps longer than this give the host time to read one and dispatch another while the next runs, so two in flight keep the device busy."""
LONG_STEP_TOKENS = 1024
"""Steps of so many tokens take longer than that, with models of 1 B parameters and more."""
LARGE_STEP_TOKENS = 256
"""The host starts a step of so many tokens in a small part of the time that it takes."""
_NUM_RECENT_STEPS = 8
ROWS_OF_LEAD = 64
"""With more requests, planning and launching a step take longer in proportion."""
_MOST_AWAITED = 0.75
"""At most this part of a step is over when the next is planned: larger steps take the host longer."""
MAX_WAIT_SECONDS = 0.02
"""Longest time that one step waits for what requests need, or for blocks that are being loaded, when there is no other work."""


class StepLoop:
    """Schedules, dispatches and reads steps in order. With two in flight, step N+1 is dispatched before the tokens of step N are read.

    More than two help only with short steps: a new request waits for every step in flight, so long steps use two. No third one
    follows a step of many tokens. The stages of a pipeline compute different steps: each one more takes one more.

    With `lead_seconds` the step behind one that computes many tokens of prompts is planned only so long before that one is over, as far
    as its time is known: requests that arrive meanwhile take part in it. `step` then returns once without results.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        executor: "Executor",
        *,
        max_in_flight: int,
        ops: OpQueue | None = None,
        wait: Callable[[float], object] = lambda seconds: None,
        lead_seconds: float | None = None,
    ):
        """ops: operations that plans carry in addition to the scheduler's. wait: waits so long at most for what requests need before they
        run. lead_seconds: planning and launching a step of up to ROWS_OF_LEAD requests take less; None: each step is planned as soon as
        it may be."""
        self.scheduler = scheduler
        self.executor = executor
        self.ops = OpQueue(executor) if ops is None else ops
        self.max_in_flight = max_in_flight
        self._wait = wait
        self._num_stages = scheduler.num_stages
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.working_on: SchedulerOutput | None = None
        """The step that is being dispatched or read; after an error, the failed step. None while planning."""
        self._outputs: list[EngineCoreOutput] = []
        self._unsampled: tuple[SchedulerOutput, PendingStep] | None = None
        """The last step in flight, if it waits for masks. No further step is dispatched until it has them."""
        self._mask_pace = MaskPace()
        self._last_read_at: float | None = None
        """When the latest step was read, if the next one was already in flight."""
        self._idle_until = 0.0
        """When the latest step was started that found none in flight."""
        self._lead_seconds = lead_seconds
        self._step_times = StepTimes()
        self._awaited_id: int | None = None
        """The latest step whose end was awaited before the next was planned."""
        self._recent_seconds: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        """Durations of the latest steps that began when the previous one ended."""
        self.wait_seconds = 0.0
        """Total time spent waiting for the device."""
        self.num_finished_steps = 0
        """Steps whose results were processed."""
        self.work_clock = WorkClock()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Keep the device busy, then return the outputs of the oldest step in flight (none if no step was in flight)."""
        if not self._in_flight:
            self.note_work()
        if (seconds := self._seconds_to_plan()) > 0:
            time.sleep(seconds)
            return self.take_outputs()
        self._dispatch()
        if not self._in_flight:
            return []
        plan, pending = self._in_flight[0]
        self.working_on = plan
        start = time.perf_counter()
        result = pending.result()
        end = time.perf_counter()
        self.wait_seconds += end - start
        self._in_flight.popleft()  # only now, so that an interrupted wait is repeated
        self.ops.take(pending)
        if self._last_read_at is not None and plan.rows:
            self._note_seconds(plan, pending, end - self._last_read_at)
        elif plan.num_tokens >= LARGE_STEP_TOKENS and plan.new_requests:
            self.scheduler.note_seconds(plan, end - self._idle_until)  # a little more than it took
        self._last_read_at = end if self._in_flight else None
        if plan.step_id == self._awaited_id and self._lead_seconds is not None and end - start < self._lead_seconds / 2:
            # It ended sooner: the device may have had nothing to do, so the next step's time is not known either.
            self._step_times.forget(plan.num_tokens)
            self._last_read_at, self._idle_until = None, end
        self._outputs += self.scheduler.update_from_output(plan, result)
        self.num_finished_steps += 1
        self._sample_if_possible()
        if not self._in_flight:
            self.note_work()
        return self.take_outputs()

    def _dispatch(self) -> None:
        """Plan and dispatch steps until enough are in flight."""
        while self._unsampled is None and len(self._in_flight) < self._depth() and self.scheduler.has_requests():
            self.working_on = None
            if self._in_flight:
                self.scheduler.wait_for_stores(self._in_flight[-1][0].num_tokens)
            self.working_on = plan = self.scheduler.schedule(masked_wait=self._mask_pace.is_apart)
            if plan.num_tokens == 0 and not plan.ops and not self.ops:
                if not self._in_flight:
                    self.scheduler.wait_for_blocks(MAX_WAIT_SECONDS)
                    self._wait(MAX_WAIT_SECONDS)
                break
            if not self._in_flight:
                self._idle_until = time.perf_counter()
            pending = self.ops.dispatch(plan)
            self._in_flight.append((plan, pending))
            if len(self._in_flight) == 1:
                self.note_work()
            if plan.masked_request_ids:
                self._unsampled = plan, pending
                self._sample_if_possible()

    def _note_seconds(self, plan: SchedulerOutput, pending: "PendingStep", seconds: float) -> None:
        """Record how long a step took that began when the step before it ended."""
        self._recent_seconds.append(seconds)
        if _computes_prompts(plan):
            self._step_times.note(plan.num_tokens, seconds)
        self.scheduler.note_seconds(plan, seconds)
        holds_up_others = 0 < len(plan.masked_request_ids) < len(plan.rows)
        self._mask_pace.note(seconds, is_late=pending.was_sampled_late if holds_up_others else None)

    def _seconds_to_plan(self) -> float:
        """Time until the next step is to be planned; 0 or less: now."""
        if self._lead_seconds is None or len(self._in_flight) != 1 or self._unsampled is not None or self._num_stages > 1:
            return 0.0
        plan = self._in_flight[0][0]
        expected = self._step_times.least(plan.num_tokens) if _computes_prompts(plan) else None
        if expected is None or self.scheduler.num_queued_tokens >= plan.num_tokens:
            return 0.0  # what waits already is as much as this step computes
        self._awaited_id = plan.step_id
        began = self._idle_until if self._last_read_at is None else self._last_read_at
        lead_seconds = self._lead_seconds * max(1.0, len(plan.rows) / ROWS_OF_LEAD)
        return began + min(expected - lead_seconds, _MOST_AWAITED * expected) - time.perf_counter()

    def _depth(self) -> int:
        """The number of steps that may be in flight now."""
        steps_are_long = bool(self._recent_seconds) and min(self._recent_seconds) > LONG_STEP_SECONDS
        steps_are_long |= bool(self._in_flight) and self._in_flight[-1][0].num_tokens >= LONG_STEP_TOKENS
        each = min(self.max_in_flight, 2) if steps_are_long else self.max_in_flight
        return each + self._num_stages - 1

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return the outputs that were read but not reported yet. Call it after an error too: their tokens are committed."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _sample_if_possible(self) -> None:
        """Fill the masks of the waiting step and sample, once the last tokens of its masked requests are known."""
        if self._unsampled is None:
            return
        plan, pending = self._unsampled
        if not self.scheduler.tokens_are_known(plan):
            return
        self.working_on = plan
        # Of others a token may be in flight behind which nothing is forced any more.
        requests = self.scheduler.requests
        masks.fill(pending, {name: requests[name] for name in plan.masked_request_ids if name in requests})
        self._unsampled = None
        pending.sample()

    def note_work(self) -> None:
        """Record in the clock whether there is work and whether a step is in flight. Call when requests end outside a step."""
        self.work_clock.note(has_work=self.has_work, in_flight=bool(self._in_flight))

    def forget(self) -> None:
        """Wait for the steps in flight and discard their results, errors included."""
        self._unsampled = self._last_read_at = None
        while self._in_flight:
            _, pending = self._in_flight.popleft()
            with contextlib.suppress(Exception):
                pending.result()
            self.ops.take(pending)

    def start_over(self) -> None:
        """Recompute every request up to its latest token, after a failure that may have left inconsistent state.

        Raises the device's error if it cannot continue.
        """
        self.forget()
        self.scheduler.start_over()
        self.executor.start_over()
        self.note_work()


def _computes_prompts(plan: SchedulerOutput) -> bool:
    """Whether a step computes many tokens of prompts."""
    num_others = plan.num_tokens - len(plan.rows)
    return num_others >= LARGE_STEP_TOKENS and num_others - sum(row.num_drafts for row in plan.rows) >= LARGE_STEP_TOKENS
