"""Results of other hosts' data-parallel ranks reach host 0 in any order in which devices finish. No JAX devices are used."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

from jaxllm.device_ops import DropStaged, MoveExperts, TakeCounts, WriteAdapter
from jaxllm.engine.executor import PendingStep
from jaxllm.errors import EngineDeadError
from jaxllm.hosts import executor, follower, results
from jaxllm.hosts.executor import HostsExecutor
from jaxllm.hosts.follower import Follower
from jaxllm.ranks_plan import RanksPlan
from jaxllm.scheduler_output import ModelRunnerOutput, RowStep, SchedulerOutput, TokenLogprobs
from tests.hosts.conftest import FOUND

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True, "tensor_parallel_size": 1}


def plan_of(step_id: int, *, masked: tuple[str, ...] = ()) -> RanksPlan:
    """A request in each data-parallel rank, of which the second has logprobs and more."""
    ranks = [SchedulerOutput([], [RowStep(name, step_id, 1, 0, [])], 1, [], [], masked_request_ids=masked) for name in "ab"]
    return RanksPlan.of(ranks, step_id)


def result_of(plan: SchedulerOutput, rank: int) -> ModelRunnerOutput:
    """Every kind of result."""
    assert isinstance(plan, RanksPlan)
    (row,) = plan.ranks[rank].rows
    name, size = row.request_id, row.start
    scores = TokenLogprobs(
        *(np.arange(size * 3, dtype=kind).reshape(size, 3) for kind in (np.int32, np.float32)), np.ones(size)
    )
    more = {"errors": {name: "why"}, "not_finite": {name}, "pooled": {name: np.full(size, 0.5, np.float32)}}
    return ModelRunnerOutput({name: [size, -1]}, {name: 1}, {name: scores}, {name: scores}, **more)


@dataclass
class FakeStep:
    """A step of both data-parallel ranks, as the host of one has it."""

    plan: RanksPlan
    rank: int
    mask_TW: np.ndarray | None
    fails: bool
    is_sampled: bool = False
    width = 1
    was_sampled_late = False

    @property
    def sampled_ids(self) -> list[str]:
        return [row.request_id for row in self.plan.rows]

    def sample(self) -> None:
        self.is_sampled = True

    def result(self) -> ModelRunnerOutput:
        assert self.mask_TW is None or self.is_sampled
        time.sleep(0.01 * (self.plan.step_id % 2) * self.rank)
        if self.fails:
            raise RuntimeError("the device is broken")
        found = result_of(self.plan, self.rank)
        found.add(self.op_results())
        return found

    def op_results(self) -> ModelRunnerOutput:
        counts = {2: np.full(3, 1 + 9 * self.rank, np.int32)} if TakeCounts() in self.plan.ops else {}
        return ModelRunnerOutput({}, expert_counts=counts)


@dataclass
class FakeExecutor:
    """The executor of a host with one data-parallel rank."""

    rank: int
    failing_step: int = -1
    steps: list[FakeStep] = field(default_factory=list)
    num_started_over: int = 0
    staged: dict[int, bytes] = field(default_factory=dict)

    def dispatch(self, plan: SchedulerOutput) -> FakeStep:
        assert isinstance(plan, RanksPlan)
        mask_TW = np.full((len(plan.rows), 4), -1, np.int32) if plan.masked_request_ids else None
        step = FakeStep(plan, self.rank, mask_TW, plan.step_id == self.failing_step)
        self.steps.append(step)
        return step

    def stage(self, handle: int, data: np.ndarray) -> None:
        self.staged[handle] = data.tobytes()

    def start_over(self) -> None:
        self.num_started_over += 1

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def on_two_hosts(together, monkeypatch) -> Iterator[Callable[[FakeExecutor], HostsExecutor]]:
    """Makes host 0's executor of both data-parallel ranks, one of which is on a follower."""
    monkeypatch.setattr(results, "PIECE_BYTES", 50)
    monkeypatch.setattr(follower, "NOTICE_SECONDS", 0.0)
    made: list[HostsExecutor] = []

    def make(other: FakeExecutor) -> HostsExecutor:
        leader, member = (future.result(60) for future in together((1, FOUND), **RANKS))
        threading.Thread(target=Follower(other, member).run, daemon=True).start()  # type: ignore[arg-type]
        made.append(HostsExecutor(FakeExecutor(0), leader))  # type: ignore[arg-type]
        return made[0]

    yield make
    made[0].close()


def check(step: PendingStep, plan: RanksPlan) -> None:
    """The step has the results of both data-parallel ranks."""
    wanted = result_of(plan, 0)
    wanted.add(result_of(plan, 1))
    for found in (step.result(), step.result()):  # an interrupted wait is repeated
        for each in fields(found):
            assert _plain(getattr(found, each.name)) == _plain(getattr(wanted, each.name)), each.name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, TokenLogprobs):
        return [_plain(getattr(value, each.name)) for each in fields(value)]
    return (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value


def test_steps_in_flight_have_the_results_of_all_ranks(on_two_hosts):
    core = on_two_hosts(FakeExecutor(1))
    plans = [plan_of(number) for number in range(1, 9)]
    steps = [core.dispatch(plan) for plan in plans[:3]]
    for number, plan in enumerate(plans):
        check(steps[number], plan)
        if number + 3 < len(plans):
            steps.append(core.dispatch(plans[number + 3]))


def test_masks_reach_all_ranks_and_counts_are_added_up(on_two_hosts):
    other = FakeExecutor(1)
    core = on_two_hosts(other)
    first, masked = core.dispatch(replace(plan_of(1), ops=(TakeCounts(),))), core.dispatch(plan_of(2, masked=("b",)))
    with pytest.raises(RuntimeError, match="never sampled"):
        masked.result()
    assert masked.mask_TW is not None
    masked.mask_TW[1] = 5
    masked.sample()
    check(masked, plan_of(2))
    for _ in range(2):
        assert first.op_results().expert_counts[2].tolist() == first.result().expert_counts[2].tolist() == [11] * 3
    np.testing.assert_array_equal(other.steps[1].mask_TW, [[-1] * 4, [5] * 4])
    core.dispatch(plan_of(3, masked=("a",)))  # never sampled
    core.start_over()
    assert other.num_started_over == 1
    check(core.dispatch(plan_of(4)), plan_of(4))


def test_operations_and_what_they_name_reach_other_hosts(on_two_hosts, monkeypatch):
    """Pieces of what is staged in several threads may come in turn."""
    monkeypatch.setattr(executor, "PIECE_BYTES", 3)
    other = FakeExecutor(1)
    core = on_two_hosts(other)
    data = {handle: np.arange(handle, 5 * handle, dtype=np.int32) for handle in (1, 2, 3)}
    threads = [threading.Thread(target=core.stage, args=item) for item in data.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.staged == {handle: part.tobytes() for handle, part in data.items()}
    ops = (WriteAdapter(3, 1), DropStaged(2), MoveExperts(4, [[[1, 2]], [[0, 2]]], [[1, 0], [2, 1]]))
    check(core.dispatch(replace(plan_of(1), ops=ops)), plan_of(1))
    assert other.steps[0].plan.ops == ops


def test_a_step_that_fails_on_another_host_ends_the_engine(on_two_hosts):
    core = on_two_hosts(FakeExecutor(1, failing_step=2))
    steps = [core.dispatch(plan_of(number)) for number in (1, 2, 3)]
    check(steps[0], plan_of(1))
    for step in steps[1:]:
        with pytest.raises(EngineDeadError, match=r"host 1 \(.*\) failed"):
            step.result()
