"""The executor of host 0: sends each call to the other hosts and runs it on its own devices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from jaxllm.engine.executor import Executor, ExecutorPrograms, MemoryAction, MemoryPart, PendingStep
from jaxllm.errors import EngineDeadError
from jaxllm.foreseen import Foreseen, Needs
from jaxllm.hosts import results
from jaxllm.hosts.leader import Leader
from jaxllm.hosts.sent_tokens import SentTokens
from jaxllm.hosts.wire import PIECE_BYTES, Dispatch, DispatchRanks, Do, Piece, Sample
from jaxllm.options.hosts import has_ranks_on_hosts, has_stages_on_hosts
from jaxllm.ranks_plan import RanksPlan
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput
from jaxllm.worker_thread import WorkerThread

T = TypeVar("T")


class HostsExecutor:
    """An Executor on the devices of several hosts. A step that fails on one of them ends the engine: the others have run it."""

    def __init__(self, own: Executor, leader: Leader):
        self._own, self._leader = own, leader
        options = leader.config.parallel
        self._tokens = SentTokens(leader) if has_stages_on_hosts(options.nnodes, options.pipeline_parallel_size) else None
        self._has_remote_ranks = has_ranks_on_hosts(options.nnodes, options.num_ranks)
        self._reader = WorkerThread("read-step")
        """Waits for devices, so that this thread can give up when a host is lost."""

    # Steps

    def dispatch(self, plan: SchedulerOutput) -> PendingStep:
        """See Executor."""
        is_sampled = not plan.masked_request_ids
        others = self.expect_others() if is_sampled else None
        self._leader.send(message_of(plan))
        step = self._run(self._own.dispatch, plan)
        if self._tokens is not None and is_sampled and plan.rows:
            self._tokens.send(step)
        return _Step(step, self, others)

    def stage(self, handle: int, data: np.ndarray) -> None:
        """See Executor. Each host sends its own part of it to its devices."""
        sent = data.reshape(-1).view(np.uint8)
        number, answered = self._leader.new_call()
        for start in range(0, len(sent), PIECE_BYTES):
            self._leader.send(Piece(number, handle, len(sent), start, sent[start : start + PIECE_BYTES].data))
        self._own.stage(handle, data)
        self._leader.wait_for(answered)
        answered.result()

    def sample(self, step: PendingStep) -> None:
        """Send the masks of a step and sample."""
        assert step.mask_TW is not None, "a step without masked requests"
        num_rows = len(step.sampled_ids) * step.width
        self._leader.send(Sample(num_rows, step.mask_TW[:num_rows].tobytes()))
        self._run(step.sample)
        if self._tokens is not None:
            self._tokens.send(step)

    def expect_others(self) -> "list[Future[bytes]]":
        """Results of other hosts' data-parallel ranks, of the call that follows; empty if there are none."""
        return self._leader.expect_results() if self._has_remote_ranks else []

    def read(self, result: Callable[[], T]) -> "Future[T]":
        """Start to wait for this host's part of a step."""
        return self._reader.submit(result)

    def wait_for(self, reading: "Future[T]") -> T:
        """The results. Raises EngineDeadError if a host is lost, or the step failed."""
        self._leader.wait_for(reading)
        return self._run(reading.result)  # type: ignore[no-any-return]

    def start_over(self) -> None:
        """See Executor."""
        self._on_all("start_over")

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """See Executor."""
        self._leader.check()
        self._own.check_idle(finished_ids)

    def _run(self, call: Any, *arguments: Any) -> Any:
        """Run a part of a step here. The other hosts cannot undo it, so an error ends the engine."""
        try:
            with self._leader.waiting():
                return call(*arguments)
        except Exception as error:
            self._leader.fail(f"a step failed on host 0: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise EngineDeadError(str(self._leader.lost.exception())) from error

    def memory(self, action: MemoryAction, part: MemoryPart) -> None:
        """See Executor."""
        self._on_all("memory", action, part)

    def _on_all(self, method: str, *arguments: str) -> None:
        """Call a method on all hosts and wait for them. Raises the error of the first that fails. No step may be in flight."""
        if self._tokens is not None:
            self._tokens.wait()
        number, answered = self._leader.new_call()
        self._leader.send(Do(number, method, [*arguments]))
        try:
            with self._leader.waiting():
                getattr(self._own, method)(*arguments)
        finally:
            self._leader.wait_for(answered)
        answered.result()

    @property
    def programs(self) -> ExecutorPrograms:
        """See Executor. Each host compiles its own."""
        return self._own.programs

    @property
    def encoder_totals(self) -> tuple[int, int]:
        """See Executor. Every host runs the same programs."""
        return self._own.encoder_totals

    def run_new_program(self) -> bool:
        """See Executor, as for the next one."""
        return self._own.run_new_program()  # never one: all hosts run the same programs, at the start

    def foresee(self, needs: Needs) -> Foreseen:
        return self._own.foresee(needs)

    def close(self) -> None:
        """End the engine on all hosts."""
        self._reader.abandon()
        if self._tokens is not None:
            self._tokens.shutdown()
        self._leader.end()
        if not self._leader.lost.done():  # else a device may wait for ever
            self._own.close()


def message_of(plan: SchedulerOutput) -> Dispatch | DispatchRanks:
    """A plan as other hosts get it, each operation once."""
    if not isinstance(plan, RanksPlan):
        return Dispatch(plan)
    return DispatchRanks([replace(rank, ops=()) for rank in plan.ranks], plan.step_id, plan.ops)


class _Step:
    """A step in flight on all hosts."""

    def __init__(self, own: PendingStep, executor: HostsExecutor, others: "list[Future[bytes]] | None"):
        """others: results of other hosts' data-parallel ranks; None: the step is not sampled yet."""
        self._own, self._executor, self._others = own, executor, others
        self._reading: Future[ModelRunnerOutput] | None = None

    @property
    def mask_TW(self) -> np.ndarray | None:
        return self._own.mask_TW

    @property
    def width(self) -> int:
        return self._own.width

    @property
    def sampled_ids(self) -> list[str]:
        return self._own.sampled_ids

    @property
    def was_sampled_late(self) -> bool:
        return self._own.was_sampled_late

    def drafts(self) -> list[list[int]]:
        return self._own.drafts()

    def set_next_drafts(self, tokens: Mapping[int, Sequence[int]]) -> None:
        raise AssertionError("grammars have no drafts for an engine on several hosts")

    def sample(self) -> None:
        self._others = self._executor.expect_others()
        self._executor.sample(self._own)

    def result(self) -> ModelRunnerOutput:
        if self._others is None:
            raise RuntimeError("the step was never sampled")  # which is no failure
        if self._reading is None:
            self._reading = self._executor.read(self._own.result)
        return self._with_others(self._executor.wait_for(self._reading), self._others)

    def op_results(self) -> ModelRunnerOutput:
        if self._others is None:
            raise RuntimeError("the step was never sampled")
        return self._with_others(self._executor.wait_for(self._executor.read(self._own.op_results)), self._others)

    def _with_others(self, own: ModelRunnerOutput, others: "list[Future[bytes]]") -> ModelRunnerOutput:
        """A new result, because an interrupted wait is repeated."""
        found = ModelRunnerOutput({})
        for each in (own, *(results.step_of(self._executor.wait_for(other)) for other in others)):
            found.add(each)
        return found
