"""Operations that features queue: when they run, and who receives their outcome. Without a device."""

from collections.abc import Callable

import pytest

from jaxllm.device_ops import DeviceOp, DropStaged, WriteAdapter, run_ops
from jaxllm.engine.op_queue import OpQueue
from jaxllm.scheduler_output import ModelRunnerOutput, RowStep, SchedulerOutput

PLAN = SchedulerOutput([], [RowStep("a", 0, 1, 0, [])], 1, [], [])


class Device:
    """Runs operations at once, and steps if they may."""

    def __init__(self) -> None:
        self.ran: list[DeviceOp] = []
        self.broken: list[DeviceOp] = []
        self.fails = self.loses_results = False

    def dispatch(self, plan: SchedulerOutput) -> "Pending":
        run_ops(plan.ops, self.run)
        if self.fails:
            raise RuntimeError("the step cannot be built")
        return Pending(self)

    def run(self, op: DeviceOp) -> list[None]:
        if op in self.broken:
            raise RuntimeError("the device is broken")
        self.ran.append(op)
        return []


class Pending:
    def __init__(self, device: Device):
        self.device = device

    def result(self) -> ModelRunnerOutput:
        if self.device.loses_results:
            raise RuntimeError("lost")
        return ModelRunnerOutput({})

    op_results = result


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def ops(device: Device) -> OpQueue:
    return OpQueue(device)  # type: ignore[arg-type]


@pytest.fixture
def told() -> list[str]:
    return []


def add(ops: OpQueue, told: list[str], *slots: int) -> list[WriteAdapter]:
    """Operations that say what became of them."""

    def note(slot: int, what: str) -> Callable[..., None]:
        return lambda found: told.append(f"{slot} {what if found is not None else 'lost'}")

    found = [WriteAdapter(slot, 10 * slot) for slot in slots]
    for op in found:
        ops.add(op, done=note(op.slot, "done"), failed=note(op.slot, "failed"))
    return found


def test_the_next_plan_carries_them_before_its_own_and_results_come_with_its_step(device, ops, told):
    wanted, own = add(ops, told, 1, 2), DropStaged(5)
    plan = SchedulerOutput([], PLAN.rows, 1, [], [], ops=(own,))
    first, second = ops.dispatch(plan), ops.dispatch(PLAN)
    assert device.ran == [*wanted, own] and not told and not ops
    ops.take(first)
    ops.take(second)
    assert told == ["1 done", "2 done"]


def test_those_behind_one_that_failed_wait_for_the_next_plan(device, ops, told):
    first, broken, last = add(ops, told, 1, 2, 3)
    device.broken = [broken]
    with pytest.raises(RuntimeError, match="the device is broken"):
        ops.dispatch(PLAN)
    assert told == ["1 lost", "2 failed"] and len(ops) == 1
    ops.take(ops.dispatch(PLAN))
    assert device.ran == [first, last] and told[2:] == ["3 done"]


def test_an_operation_of_the_plan_fails_as_itself_whatever_else_the_plan_carries(device, ops, told):
    plan = SchedulerOutput([], PLAN.rows, 1, [], [], ops=(broken := DropStaged(5),))
    device.broken = [broken]
    for slots, outcome in (((), []), ((1,), ["1 lost"])):
        add(ops, told, *slots)
        with pytest.raises(RuntimeError, match="the device is broken"):
            ops.dispatch(plan)
        assert told == outcome and not ops


def test_a_step_that_fails_behind_them_loses_results_alone(device, ops, told):
    wanted = add(ops, told, 1)
    device.fails = True
    with pytest.raises(RuntimeError, match="cannot be built"):
        ops.dispatch(PLAN)
    assert device.ran == wanted and told == ["1 lost"] and not ops
    device.fails, device.loses_results = False, True
    add(ops, told, 2)
    ops.take(ops.dispatch(PLAN))
    assert told == ["1 lost", "2 lost"]


def test_without_requests_they_run_in_a_plan_of_their_own_after_those_in_flight(device, ops, told):
    add(ops, told, 1)
    pending = ops.dispatch(PLAN)
    add(ops, told, 2)
    ops.run_now()
    assert told == ["1 done", "2 done"]
    ops.take(pending)
    ops.run_now()
    assert told == ["1 done", "2 done"] and len(device.ran) == 2
