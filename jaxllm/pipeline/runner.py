"""PipelineRunner: runs each step through the stages of a pipeline, one after the other, without waiting for any of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np

from jaxllm.device_ops import DeviceOp
from jaxllm.foreseen import Foreseen, Needs
from jaxllm.pipeline.lost_peers import LostPeers
from jaxllm.pipeline.sampled_tokens import TokensOnDevices
from jaxllm.pipeline.transfer import Transfer
from jaxllm.progress import Progress
from jaxllm.runner.all_programs import AllPrograms
from jaxllm.runner.batch import Batch
from jaxllm.runner.heads import PendingPart
from jaxllm.runner.memory import entering_bytes
from jaxllm.runner.ops import PlanRunner
from jaxllm.runner.pending import StepInFlight
from jaxllm.runner.rows import Rows
from jaxllm.runner.runner import ModelRunner
from jaxllm.scheduler_output import SchedulerOutput


class Stages(PlanRunner):
    """The stages of a pipeline that this process has: an executor's methods, each for all of them."""

    def __init__(self, earlier: Sequence[ModelRunner], last: ModelRunner, transfers: Sequence[Transfer], num_stages: int):
        """last: of this process. transfers: those to stages on other hosts, in the order of the stages; num_stages: of all hosts."""
        self._earlier, self.last = tuple(earlier), last
        self.stages = (*self._earlier, last)
        self._transfers, self._num_stages = tuple(transfers), num_stages
        self.programs = AllPrograms([part.programs for part in self._parts])

    # Steps

    def stage(self, handle: int, data: np.ndarray) -> None:
        """See Executor. Each stage takes what is its own."""
        for stage in self.stages:
            stage.stage(handle, data)

    def run_op(self, op: DeviceOp) -> list[PendingPart]:
        """See PlanRunner. Each stage does what is its own."""
        return [part for stage in self.stages for part in stage.run_op(op)]

    def drain(self) -> None:
        """See PlanRunner."""
        self.last.drain()  # it launches the steps of all stages

    def run_earlier(self, batch: Batch, entering: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Start a step on all stages before the last of this process. entering: what enters the first. Returns what enters the last."""
        for stage, following in pairwise(self.stages):
            entering = (jax.device_put(stage.pass_on(batch, entering), following.shapes.replicated),)
        return entering

    def take_tokens(self, tokens: Sequence[int]) -> None:
        """See TokenTaker."""

    def forget_tokens(self) -> None:
        """Drop the tokens on the way to the first stage. No step may be in flight."""

    def start_over(self) -> None:
        """See ModelRunner."""
        for stage in reversed(self.stages):  # the last drains the launches of all
            stage.start_over()
        self.forget_tokens()

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """See ModelRunner."""
        self.last.check_idle(finished_ids)

    def wait(self) -> None:
        """Wait until the devices have run all steps dispatched so far."""
        for stage in reversed(self.stages):
            stage.wait()

    # The start

    def start_programs(self, *, rare_later: bool) -> None:
        """See ModelRunner, as for the methods that follow."""
        for part in self._parts:
            part.start_programs(rare_later=rare_later)

    def start_programs_when_idle(self) -> None:
        for part in self._parts:
            part.start_programs_when_idle()

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        for part in self._parts:
            part.wait_for_programs(progress, rare=rare)

    def work_bytes(self) -> int:
        shapes = self.last.shapes
        waiting = entering_bytes(shapes.model, shapes.buckets.tokens[-1], self._num_stages)
        return max(stage.work_bytes() for stage in self.stages) + waiting

    def load_weights(self, model_dir: Path, progress: Progress) -> None:
        for stage in self.stages:
            stage.load_weights(model_dir, progress)

    def begin_ops(self) -> None:
        for stage in self.stages:
            stage.begin_ops()

    def take_weights(self, other: "Stages") -> None:
        for stage, same in zip(self.stages, other.stages, strict=True):
            stage.take_weights(same)

    def allocate_caches(self) -> None:
        for stage in self.stages:
            stage.allocate_caches()

    def warm_up(self) -> None:
        for transfer in self._transfers:  # first: the other hosts begin now
            transfer.warm_up()
        for stage in self.stages:
            stage.warm_up()

    def run_new_program(self) -> bool:
        """There is none: the programs of all stages run at the start."""
        return False

    def memory(self, action: str, part: str) -> None:
        """See Executor."""
        for stage in reversed(self.stages):  # the last drains the launches of all
            stage.memory(action, part)
        if part == "kv_cache":
            self.forget_tokens()

    # Any time

    @property
    def _parts(self) -> tuple[ModelRunner | Transfer, ...]:
        """All that has programs."""
        return (*self.stages, *self._transfers)

    @property
    def params(self) -> tuple[jax.Array, ...]:
        """The weights of all stages."""
        return tuple(array for stage in self.stages for array in stage.params)

    @property
    def rows(self) -> tuple[Rows, ...]:
        return self.last.rows

    @property
    def launch_seconds(self) -> float:
        return self.last.launch_seconds

    def foresee(self, needs: Needs) -> Foreseen:
        return self.last.foresee(needs)

    def close(self) -> None:
        self.forget_tokens()
        for stage in reversed(self.stages):  # the last ends the launches of all
            stage.close()


class PipelineRunner(Stages):
    """An executor over stages: those of this process, the last of the pipeline among them. It makes a step's batch, has the others run it
    first, and samples.

    What a stage leaves goes to the next one's devices as they become ready; so do sampled tokens from the last stage to the first, if it is
    of this process. The host waits for neither. While a stage computes one step, those before it can compute later ones: see `Scheduler`
    for which requests these have.
    """

    def __init__(
        self, earlier: Sequence[ModelRunner], last: ModelRunner, *, entry: Transfer | None = None, num_stages: int | None = None
    ):
        """entry: from the stages before, if other hosts have these. num_stages: of all hosts, if not those given."""
        super().__init__(earlier, last, [] if entry is None else [entry], num_stages or 1 + len(earlier))
        self._entry = entry
        self._tokens = None
        last.enter = self._enter_last
        if entry is None:
            self._tokens = TokensOnDevices(self._earlier[0], len(self.stages))
            last.on_sampled = self._tokens.send_back
        else:
            last.launch_in_thread()
        last.heads = (*last.heads, LostPeers(self._earlier))

    def start_step(self, plan: SchedulerOutput) -> StepInFlight:
        """See ModelRunner."""
        return self.last.start_step(plan)

    def _enter_last(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Start a step on all stages before the last. Returns what enters this one."""
        if self._tokens is not None:
            self._tokens.give(batch)
        entering = () if self._entry is None else (self._entry.receive(batch.layout.num_tokens),)
        return self.run_earlier(batch, entering)

    def forget_tokens(self) -> None:
        """See Stages."""
        if self._tokens is not None:
            self._tokens.forget()
