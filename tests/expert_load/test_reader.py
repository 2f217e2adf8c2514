"""When the tokens of experts are fetched, and what becomes of them. Without a device."""

import numpy as np
import pytest

from jaxllm.device_ops import TakeCounts
from jaxllm.engine.op_queue import OpQueue
from jaxllm.expert_load.layout import Layout, balance_of
from jaxllm.expert_load.reader import IDLE_SECONDS, INTERVAL_SECONDS, LoadReader
from jaxllm.replicas.calls import COMBINE
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Device:
    """A loop and its device: hands out what a list says, one after the other, when a step was read."""

    def __init__(self, *counts: list[list[int]] | Exception):
        self.counts = list(counts)
        self.num_taken = 0
        self.ops = OpQueue(self)  # type: ignore[arg-type]
        self.in_flight: list[Device] = []

    def dispatch(self, plan: SchedulerOutput) -> "Device":
        self.num_taken += plan.ops.count(TakeCounts())
        return self

    def step(self) -> None:
        """Dispatch a plan."""
        self.in_flight.append(self.ops.dispatch(SchedulerOutput([], [], 1, [], [])))  # type: ignore[arg-type]

    def read(self) -> None:
        """Read a step."""
        self.ops.take(self.in_flight.pop(0))  # type: ignore[arg-type]

    def result(self) -> ModelRunnerOutput:
        found = self.counts.pop(0) if self.counts else [[0] * 4] * 2
        if isinstance(found, Exception):
            raise found
        return ModelRunnerOutput({}, expert_counts=dict(zip((1, 3), np.array(found, np.int32), strict=True)))

    op_results = result


def new(device: Device, *, num_devices: int = 2) -> tuple[LoadReader, list[float]]:
    now = [100.0]
    layout = Layout(layers=(1, 3), num_experts=(4, 2), num_layers=4, num_devices=num_devices)
    return LoadReader(device.ops, layout, clock=lambda: now[0]), now


def test_a_busy_engine_is_asked_at_intervals_and_never_waited_for() -> None:
    device = Device([[1, 2, 3, 4], [5, 1, 0, 0]])
    reader, now = new(device)
    for _ in range(3):
        device.step()
        reader.note_step(is_idle=False)
        now[0] += INTERVAL_SECONDS / 2
    device.step()
    assert device.num_taken == 1
    now[0] += 5 * INTERVAL_SECONDS
    reader.note_step(is_idle=False)
    device.step()
    assert device.num_taken == 1 and not reader.tokens_LE.any(), "one reading at a time, taken in with its step"
    while device.in_flight:
        device.read()
    assert reader.tokens_LE.tolist() == [[1, 2, 3, 4], [5, 1, 0, 0]]


def test_a_reading_that_is_on_its_way_is_waited_for_by_who_wants_to_know_now() -> None:
    """It counts earlier steps. One that no plan carries yet is the one that is wanted."""
    device = Device([[1, 0, 0, 0], [0] * 4], [[2, 0, 0, 0], [0] * 4])
    reader, now = new(device)
    reader.note_step(is_idle=False)
    now[0] += INTERVAL_SECONDS
    reader.note_step(is_idle=False)
    device.step()
    assert reader.table()["tokens"][0] == [3, 0, 0, 0] and device.num_taken == 2
    now[0] += INTERVAL_SECONDS
    reader.note_step(is_idle=False)
    now[0] += INTERVAL_SECONDS
    reader.note_step(is_idle=False)
    reader.read()
    assert device.num_taken == 3


def test_an_engine_that_has_become_idle_is_asked_at_once_but_not_after_each_of_many_short_requests() -> None:
    device = Device()
    reader, now = new(device)
    reader.note_step(is_idle=True)
    assert device.num_taken == 1
    reader.note_step(is_idle=True)
    assert device.num_taken == 1
    now[0] += 2 * IDLE_SECONDS
    reader.note_step(is_idle=True)
    assert device.num_taken == 2


def test_the_busiest_is_found_in_each_reading_by_devices_or_by_experts() -> None:
    counts = [[[1, 2, 3, 4], [5, 1, 0, 0]], [[6, 2, 0, 0], [0, 0, 0, 0]]]
    for num_devices, even, busiest in (
        (2, (0.0, 5.0 + 4.0, 0.0, 3.0), (0.0, 7.0 + 8.0, 0.0, 5.0)),
        (1, (0.0, 2.5 + 2.0, 0.0, 3.0), (0.0, 4.0 + 6.0, 0.0, 5.0)),
    ):
        reader, _ = new(Device(*counts), num_devices=num_devices)
        reader.read()
        reader.read()
        assert (tuple(reader._even), tuple(reader._busiest)) == (even, busiest)
    assert reader.table() == {"layers": [1, 3], "tokens": [[7, 4, 3, 4], [5, 1]]}


def test_a_failed_step_loses_its_counts_alone() -> None:
    reader, _ = new(Device(RuntimeError("a step failed"), [[1, 0, 0, 0], [0, 0, 0, 0]]))
    reader.read()
    reader.read()
    assert reader.tokens_LE.sum() == 1


def test_counts_may_grow_beyond_what_the_device_counts_to() -> None:
    reader, _ = new(Device(*([[[2**31 - 1, 0, 0, 0], [0, 0, 0, 0]]] * 3)))
    for _ in range(3):
        reader.read()
    assert reader.tokens_LE[0, 0] == 3 * (2**31 - 1)


def test_balance() -> None:
    assert balance_of([np.array([2, 2]), np.array([1, 3])]) == pytest.approx(4 / 5)
    assert balance_of([np.array([0, 0])]) == 1.0


def test_the_tables_of_replicas_are_added() -> None:
    tables = [{"layers": [1], "tokens": [[1, 2]]}, {"layers": [1], "tokens": [[3, 4]]}]
    assert COMBINE["expert_load"](tables) == {"layers": [1], "tokens": [[4, 6]]}
