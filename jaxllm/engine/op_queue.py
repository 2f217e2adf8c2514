"""Operations on the devices that features want: the next plan carries them, and their results come back with its step's. No JAX."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxllm.device_ops import AnyDeviceOp, DeviceOpError
from jaxllm.log import logger
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from jaxllm.engine.executor import Executor, PendingStep

Done = Callable[[ModelRunnerOutput | None], None]
"""Takes the results of a plan's operations; None: they are lost."""
Failed = Callable[[Exception], None]
"""Takes the error of an operation. It may raise another one that the engine is to recover from."""


@dataclass(eq=False)
class QueuedOp:
    """An operation, and who waits for it."""

    op: AnyDeviceOp
    done: Done | None = None
    failed: Failed | None = None
    is_dispatched: bool = False
    """Whether a plan carries it."""

    def lose(self) -> None:
        """Its results never come."""
        if self.done is not None:
            self.done(None)

    def fail(self, cause: Exception) -> None:
        """It failed."""
        if self.failed is not None:
            self.failed(cause)
        else:
            self.lose()


class OpQueue:
    """Operations that wait for a plan, and those whose results are on their way. The step loop's thread calls all methods."""

    def __init__(self, executor: "Executor"):
        self._executor = executor
        self._queued: list[QueuedOp] = []
        self._in_flight: deque[tuple[PendingStep, list[QueuedOp]]] = deque()
        """Steps in flight, each with those of its operations whose results are awaited."""
        self._handles = itertools.count(1)

    def __len__(self) -> int:
        """The number of operations that wait for a plan."""
        return len(self._queued)

    def new_handle(self) -> int:
        """A handle for `Executor.stage`."""
        return next(self._handles)

    def add(self, op: AnyDeviceOp, *, done: Done | None = None, failed: Failed | None = None) -> QueuedOp:
        """Have the next plan carry an operation, behind those added before.

        done: called once its step was read or discarded. failed: called in its place if the operation itself fails. A failure of the step
        behind it leaves the operation done.
        """
        self._queued.append(entry := QueuedOp(op, done, failed))
        return entry

    def dispatch(self, plan: SchedulerOutput) -> "PendingStep":
        """Dispatch a plan with the operations that wait for one. Raises the error of an operation; those behind it wait on."""
        entries, self._queued = self._queued, []
        if entries:
            plan = replace(plan, ops=(*(entry.op for entry in entries), *plan.ops))
        try:
            pending = self._executor.dispatch(plan)
        except DeviceOpError as error:
            self._queued = entries[error.number + 1 :]
            for entry in entries[: error.number]:
                entry.lose()
            for entry in entries[error.number : error.number + 1]:
                entry.fail(error.cause)
            raise error.cause from None
        except BaseException:
            for entry in entries:
                entry.lose()
            raise
        for entry in entries:
            entry.is_dispatched = True
        if waiting := [entry for entry in entries if entry.done is not None]:
            self._in_flight.append((pending, waiting))
        return pending

    def take(self, pending: "PendingStep") -> None:
        """Pass on the results of a step's operations. Called when the step was read or is discarded, in the order of dispatch."""
        if self._in_flight and self._in_flight[0][0] is pending:
            _, entries = self._in_flight.popleft()
            _pass_on(_results(pending.op_results), entries)

    def run_now(self) -> None:
        """Run the operations that wait in a plan of their own, and pass on the results of all. Waits for the devices."""
        in_flight, self._in_flight = self._in_flight, deque()
        for pending, entries in in_flight:
            if (found := _results(pending.op_results)) is None:
                self._in_flight.append((pending, entries))
            else:
                _pass_on(found, entries)
        if self._queued:
            pending = self.dispatch(SchedulerOutput([], [], 0, [], []))
            entries = self._in_flight.pop()[1] if self._in_flight and self._in_flight[-1][0] is pending else []
            _pass_on(_results(pending.result), entries)


def _results(read: Callable[[], ModelRunnerOutput]) -> ModelRunnerOutput | None:
    """The results that `read` returns; None after an error, which comes from an earlier step and is found with its results."""
    try:
        return read()
    except Exception as error:
        logger.debug("the results of operations cannot be read: %s", error)
        return None


def _pass_on(found: ModelRunnerOutput | None, entries: list[QueuedOp]) -> None:
    for entry in entries:
        assert entry.done is not None
        entry.done(found)
