"""Decides how to handle a failed step: recompute it in smaller steps, end its requests, or end the engine (docs/FAULTS.md)."""

import time
from collections import deque
from collections.abc import Callable

from jaxllm import address_space
from jaxllm.device_errors import Failure, is_out_of_memory, is_out_of_pool, kind_of
from jaxllm.device_ops import EncodeItem, EncodeParts
from jaxllm.engine.loop import StepLoop
from jaxllm.errors import EngineDeadError, OutOfMemoryError
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind
from jaxllm.scheduler.errors import LostError, PlanError, UpdateError
from jaxllm.scheduler_output import SchedulerOutput

MAX_RETRIES = 2
"""Number of times that a request is recomputed after the device ran out of memory, until it gets another token."""

MAX_FAILED_STEPS, WINDOW_SECONDS = 3, 60.0
"""Number of steps that may fail within this many seconds. One more failure ends the engine."""

MAX_DIVISOR = 64
"""Steps are never limited to less than this fraction of the options' sizes."""

CALM_STEPS = 64
"""After this many successful steps in a row, the size limit of steps doubles."""


class FailurePolicy:
    """Handles each failed step, and keeps the counts that this requires."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._failure_times: deque[float] = deque(maxlen=MAX_FAILED_STEPS)
        self._retries: dict[str, tuple[int, int]] = {}
        """By request: its number of tokens when memory last ran out in its step, and the number of such failures since."""
        self._divisor = 1
        self._num_calm_steps = 0
        self.num_retried_steps = self.num_lost_steps = 0
        """Failed steps whose requests (except single ones) were recomputed, and failed steps that ended all their requests."""

    @property
    def limits_steps(self) -> bool:
        """Whether steps are smaller than the options allow."""
        return self._divisor > 1

    def recover(self, loop: StepLoop, error: Exception) -> list[EngineCoreOutput]:
        """Prepare the loop to continue after its step raised an error. Returns the outputs of the requests that end.

        Raises EngineDeadError if it cannot continue.
        """
        step_ids = [] if loop.working_on is None else _requests_of(loop.working_on)
        told = loop.take_outputs()
        kind = kind_of(error)
        if kind is Failure.ENGINE:
            raise EngineDeadError(explain(error)) from error
        if isinstance(error, PlanError):
            logger.error("%s; the others are computed again", error, exc_info=error)
            if error.request_id not in loop.scheduler.requests:
                self._count_failure(error)
            self.num_retried_steps += 1
            ended, why, message = [error.request_id], ErrorKind.INTERNAL, _message(error.__cause__ or error)
        elif isinstance(error, LostError):
            logger.error("%s; %d requests end, the others are computed again", error, len(error.request_ids), exc_info=error)
            if kind is not Failure.OUT_OF_MEMORY:
                self._count_failure(error)
            self.num_retried_steps += 1
            ended, why, message = error.request_ids, ErrorKind.INTERNAL, _message(error.__cause__ or error)
        elif kind is Failure.OUT_OF_MEMORY and not isinstance(error, UpdateError):
            self.num_retried_steps += 1
            ended = self._retry(loop, step_ids)
            why = ErrorKind.OUT_OF_MEMORY
            message = "the device has no memory for the request, in steps of any size; make it smaller or try again later"
            logger.warning(
                "%s; requests are computed again in steps of 1/%d of the size, %d of %d end",
                explain(error),
                self._divisor,
                len(ended),
                len(step_ids),
            )
        else:
            self._count_failure(error)
            self.num_lost_steps += 1
            if isinstance(error, UpdateError):
                told += error.outputs
            ended, why, message = step_ids, ErrorKind.INTERNAL, _message(error.__cause__ or error)
            logger.error("a step failed: %d requests end, the engine goes on", len(ended), exc_info=error)
        try:
            loop.start_over()
        except Exception as second:
            raise EngineDeadError(f"{explain(error)}; and then the engine could not start over: {explain(second)}") from error
        self._num_calm_steps = 0
        loop.scheduler.limit_steps(self._divisor)
        return told + loop.scheduler.fail_requests(ended, why, message)

    def note_success(self, loop: StepLoop) -> None:
        """Record a successful step while steps are limited; after CALM_STEPS of them, raise the limit."""
        self._num_calm_steps += 1
        if self._num_calm_steps >= CALM_STEPS:
            self._num_calm_steps = 0
            self._divisor //= 2
            loop.scheduler.limit_steps(self._divisor)

    def _retry(self, loop: StepLoop, step_ids: list[str]) -> list[str]:
        """Make steps smaller. Returns the requests to end: the youngest of those that were retried too often, more of them
        each time."""
        self._divisor = min(2 * self._divisor, MAX_DIVISOR)
        requests = loop.scheduler.requests
        retries = {request_id: known for request_id, known in self._retries.items() if request_id in requests}
        hopeless = []
        for request_id in step_ids:
            if request_id not in requests:
                continue
            num_tokens = requests[request_id].num_tokens
            num_before, count = retries.get(request_id, (num_tokens, 0))
            count = count + 1 if num_tokens == num_before else 1
            retries[request_id] = (num_tokens, count)
            if count > MAX_RETRIES:
                hopeless.append((count, request_id))
        self._retries = retries
        if not hopeless:
            return []
        num_ended = 1 << (max(count for count, _ in hopeless) - MAX_RETRIES - 1)
        ids = {request_id for _, request_id in hopeless}
        return [request_id for request_id in requests if request_id in ids][-num_ended:]  # kept in the order of arrival

    def _count_failure(self, error: Exception) -> None:
        """Count a failed step. Raises EngineDeadError if steps fail too often."""
        now = self._clock()
        times = self._failure_times
        if len(times) == MAX_FAILED_STEPS and now - times[0] < WINDOW_SECONDS:
            raise EngineDeadError(
                f"{explain(error)}; it is the {MAX_FAILED_STEPS + 1}th failed step in {WINDOW_SECONDS:g} s"
            ) from error
        times.append(now)


def _requests_of(plan: SchedulerOutput) -> list[str]:
    """The requests that a step computes, and those that wait for an item of which it encodes a part."""
    waiting = (op.request_id for op in plan.ops if isinstance(op, EncodeItem | EncodeParts) and op.request_id)
    return [*dict.fromkeys((*plan.num_scheduled_tokens, *waiting))]


def explain(error: BaseException) -> str:
    """Describe a failed step or a failed start, for the log and the operator."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    if not is_out_of_memory(error):
        return f"a step failed: {type(error).__name__}: {error}"
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    if address_space.is_full(error):
        return f"memory ran out ({first_line}){address_space.describe_limit()}"
    if not is_out_of_pool(error):
        return (
            f"the device ran out of memory beside JAX's pool ({first_line}); lower --gpu-memory-utilization, which leaves more for what "
            "collectives and compiled programs take there, or end other programs on the device"
        )
    return (
        f"the device ran out of memory ({first_line}); lower --max-num-batched-tokens, --max-num-seqs, --max-model-len or "
        f"--gpu-memory-utilization (the cache took what these leave), or raise --tensor-parallel-size{address_space.describe_limit()}"
    )


def _message(error: BaseException) -> str:
    """The message for clients, without internal details; those are in the log."""
    return f"the engine failed while it computed the request ({type(error).__name__}); it goes on, so try again"
