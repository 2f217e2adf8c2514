"""Runs the operations of a plan before its step: each kind is one feature's, found by the type of the operation."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.device_ops import DeviceOp, run_ops
from jaxllm.runner.heads import PendingPart
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from jaxllm.runner.batch import Batch
    from jaxllm.runner.step_feature import StepFeature


class OpRunner:
    """Runs the operations of a feature on the devices of a runner, as far as these have what they change."""

    ops: tuple[type[DeviceOp], ...]
    """Their kinds."""

    def run(self, op: Any) -> PendingPart | None:
        """Start an operation. Returns what the host reads of it, if anything."""
        raise NotImplementedError

    def before_step(self, batches: Sequence["Batch"]) -> None:
        """Called before each step, behind the operations of its plan, with the batches of all ranks: their chunks say where in the step
        the tokens of a request are. May be called in the thread that launches steps, after every launch before. Without batches behind
        the operations of a plan without rows."""

    def stage(self, handle: int, data: np.ndarray) -> None:
        """Send data to the devices if it is for these operations. Any thread may call it."""

    def replace_lost(self) -> None:
        """Make arrays anew that a failed operation took."""

    def begin(self) -> None:
        """Begin in the background what takes long and needs no memory of devices: weights are read meanwhile. Called once. Raises
        ConfigError for what need not wait."""

    def take_over(self, other: Any) -> None:
        """Take over what another runner of the same features has begun, which loses it."""

    def allocate(self) -> None:
        """Allocate the arrays that operations change, with the KV cache: at the start, and after `release`."""

    def release(self) -> None:
        """Release them, with the KV cache, once nothing uses them."""

    def delete_arrays(self) -> None:
        """Release what was staged."""


@dataclass(slots=True)
class OpsInFlight:
    """A PendingStep without requests: the operations of a plan without rows."""

    parts: Sequence[PendingPart]
    mask_TW = None
    width = 1
    sampled_ids = ()
    was_sampled_late = False

    def drafts(self) -> list[list[int]]:
        return []

    def sample(self) -> None:
        """Nothing is sampled."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the operations and return their results."""
        return collected(self.parts)

    op_results = result


class PlanRunner:
    """Runs plans: first their operations, then their step."""

    num_steps = 0
    dispatch_seconds = 0.0
    """Total host time of starting all steps, in seconds."""
    encoder_totals = (0, 0)
    """See Executor."""

    def dispatch(self, plan: SchedulerOutput) -> Any:
        """See Executor."""
        parts: list[PendingPart] = []
        if plan.ops:
            self.drain()
            parts = run_ops(plan.ops, self.run_op)
            if not plan.rows:
                self.finish_ops()
                return OpsInFlight(parts)
        start = time.perf_counter()
        step = self.start_step(plan)
        step.op_parts = parts
        self.num_steps += 1
        self.dispatch_seconds += time.perf_counter() - start
        return step

    def drain(self) -> None:
        """Wait until every launch in a thread has run, including failed ones."""
        raise NotImplementedError

    def run_op(self, op: DeviceOp) -> list[PendingPart]:
        """Start an operation after all earlier launches. Returns what the host reads of it."""
        raise NotImplementedError

    def finish_ops(self) -> None:
        """Start what operations of a plan without rows left to be done before its step."""

    def start_step(self, plan: SchedulerOutput) -> Any:
        """Start the step of a plan and return at once."""
        raise NotImplementedError


def op_runners(features: Iterable["StepFeature"], device: Any) -> tuple[OpRunner, ...]:
    """The runners of the operations of features on a `ModelRunner`."""
    return tuple(runner for feature in features if (runner := feature.op_runner(device)) is not None)


def run_by(runners: Iterable[OpRunner], op: DeviceOp) -> list[PendingPart]:
    """Run an operation. Where no feature has what it changes, as on some stages of a pipeline, nothing happens."""
    parts = (runner.run(op) for runner in runners if type(op) in runner.ops)
    return [part for part in parts if part is not None]


def collected(parts: Iterable[PendingPart]) -> ModelRunnerOutput:
    """The results of operations. Waits for them."""
    output = ModelRunnerOutput({})
    for part in parts:
        part.collect(output)
    return output
