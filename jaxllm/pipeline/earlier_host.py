"""EarlierHost: the stages of a host without the last one. It runs the plans of host 0, which has the last stage, as far as they go here."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from jaxllm.device_ops import run_ops
from jaxllm.pipeline.lost_peers import check_peers
from jaxllm.pipeline.runner import Stages
from jaxllm.pipeline.sampled_tokens import TokensThroughHosts
from jaxllm.pipeline.transfer import Transfer
from jaxllm.runner.ops import OpsInFlight
from jaxllm.runner.pending import StepInFlight
from jaxllm.runner.runner import ModelRunner
from jaxllm.scheduler_output import NOT_FINITE, SchedulerOutput


class EarlierHost(Stages):
    """An executor whose steps sample nothing. Batches are the same on all hosts, because rows and sizes follow from the plans alone.

    Steps are launched in the order of their plans. The first stage waits for tokens that the last one sampled (`take_tokens`); what enters
    another one comes from the host before.
    """

    def __init__(self, stages: Sequence[ModelRunner], *, entry: Transfer | None, leave: Transfer, num_stages: int):
        """entry: from the stages before, which other hosts have; None if the first stage is here. leave: to those behind."""
        *earlier, last = stages
        super().__init__(earlier, last, [leave] if entry is None else [entry, leave], num_stages)
        self._entry, self._leave = entry, leave
        self._tokens = TokensThroughHosts(last.buckets.num_rows) if entry is None else None
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        """Launches of steps and operations, each with the number of steps whose tokens must be known."""

    def dispatch(self, plan: SchedulerOutput) -> StepInFlight | OpsInFlight:
        """Start a step, as soon as its tokens are known, behind the plan's operations. Its result is empty, and there once the devices of
        this host have run it."""
        if plan.ops:
            self._waiting.append((0, partial(run_ops, plan.ops, self.run_op)))  # what they return is of no use here
        if not plan.rows:
            self._launch_known()
            return OpsInFlight(())
        step = StepInFlight(self.last.batches.apply(plan))
        batch = step.batch
        self._waiting.append((0 if self._tokens is None else self._tokens.note(batch), partial(self._launch, step)))
        self._launch_known()
        return step

    def take_tokens(self, tokens: Sequence[int]) -> None:
        """See TokenTaker. Raises RuntimeError if a device here lost what they were sampled of."""
        if NOT_FINITE in tokens:
            check_peers(self.stages)
        if self._tokens is not None:
            self._tokens.take(tokens)
            self._launch_known()

    def _launch_known(self) -> None:
        while self._waiting:
            needed, launch = self._waiting[0]
            if self._tokens is not None and not self._tokens.are_known(needed):
                return
            launch()
            self._waiting.popleft()

    def _launch(self, step: StepInFlight) -> None:
        batch = step.batch
        if self._tokens is not None:
            self._tokens.write(batch)
        entering = () if self._entry is None else (self._entry.receive(batch.layout.num_tokens),)
        leaving_TD = self.last.pass_on(batch, self.run_earlier(batch, entering))
        step.done = [self._leave.send(leaving_TD)]

    def forget_tokens(self) -> None:
        """See Stages."""
        self._waiting.clear()
        if self._tokens is not None:
            self._tokens.forget()
