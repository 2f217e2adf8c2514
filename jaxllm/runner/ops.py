"""Runs the operations of a plan before its step: each kind is one feature's, found by the type of the operation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxllm.device_ops import DeviceOp, run_ops
from jaxllm.runner.consumers import PendingPart
from jaxllm.runner.step_programs import ProgramKey
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput


class OpFeature(Protocol):
    """Runs some kinds of operations on the devices of a runner, as far as these have what they change."""

    @property
    def ops(self) -> tuple[type[DeviceOp], ...]:
        """The kinds."""

    @property
    def program(self) -> str:
        """The kind of the program that they run."""

    def run(self, op: Any) -> PendingPart | None:
        """Start an operation. Returns what the host reads of it, if anything."""

    def run_on_nothing(self, key: ProgramKey) -> None:
        """Run the program once for its first runs; nothing changes."""


@dataclass(slots=True)
class OpsInFlight:
    """A PendingStep without requests: the operations of a plan without rows."""

    parts: Sequence[PendingPart]
    mask_TW = None
    width = 1
    sampled_ids = ()
    was_drawn_late = False

    def drafts(self) -> list[list[int]]:
        return []

    def draw(self) -> None:
        """Nothing is sampled."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the operations and return their results."""
        return collected(self.parts)

    op_results = result


class PlanRunner:
    """Runs plans: first their operations, then their step."""

    def dispatch(self, plan: SchedulerOutput) -> Any:
        """See Executor."""
        if not plan.ops:
            return self.start_step(plan)
        self.drain()
        parts = run_ops(plan.ops, self.run_op)
        if not plan.rows:
            return OpsInFlight(parts)
        step = self.start_step(plan)
        step.op_parts = parts
        return step

    def drain(self) -> None:
        """Wait until every launch in a thread has run, including failed ones."""
        raise NotImplementedError

    def run_op(self, op: DeviceOp) -> list[PendingPart]:
        """Start an operation after all earlier launches. Returns what the host reads of it."""
        raise NotImplementedError

    def start_step(self, plan: SchedulerOutput) -> Any:
        """Start the step of a plan and return at once."""
        raise NotImplementedError


def by_type(features: Iterable[OpFeature]) -> dict[type[DeviceOp], OpFeature]:
    """Which feature runs an operation."""
    return {op: feature for feature in features for op in feature.ops}


def run_by(features: dict[type[DeviceOp], OpFeature], op: DeviceOp) -> list[PendingPart]:
    """Run an operation by its feature."""
    part = features[type(op)].run(op)
    return [] if part is None else [part]


def collected(parts: Iterable[PendingPart]) -> ModelRunnerOutput:
    """The results of operations. Waits for them."""
    output = ModelRunnerOutput({})
    for part in parts:
        part.collect(output)
    return output
