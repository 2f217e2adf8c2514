"""Requests with and without a grammar in one loop, on a device whose steps take a known time."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import loop as loop_module
from jaxllm.engine.loop import StepLoop
from jaxllm.engine.mask_pace import MaskPace
from jaxllm.request import ErrorKind, Request
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.helpers.scheduling import make_request, make_scheduler, result_of


class AnyToken:
    """Follows an output under no grammar."""

    is_done = False

    def advance(self, token_id: int) -> None:
        """Any token is allowed."""


class Device:
    """Runs steps one after the other, in milliseconds of a simulated clock; the host learns of a finished step 1 ms later."""

    forward, sample, delay, dispatching = 8.0, 0.05, 1.0, 0.1

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.known: dict[str, int] = {}

    def dispatch(self, plan: SchedulerOutput) -> "Step":
        self.now += self.dispatching
        self.known |= {data.request_id: len(data.token_ids) for data in plan.new_requests}
        return Step(self, plan)


class Step:
    was_sampled_late = False

    def __init__(self, device: Device, plan: SchedulerOutput) -> None:
        self.device = device
        rows = (row for row in plan.rows if row.start + row.num_tokens >= device.known[row.request_id])
        self.sampled = {row.request_id: [7] for row in rows}
        self.forward_end = device.free_at = max(device.now, device.free_at) + device.forward
        self.end = None if plan.masked_request_ids else self.forward_end

    def sample(self) -> None:
        device = self.device
        self.was_sampled_late = self.forward_end <= device.now
        self.end = device.free_at = max(device.now, self.forward_end) + device.sample

    def result(self) -> ModelRunnerOutput:
        assert self.end is not None
        self.device.now = max(self.device.now, self.end + self.device.delay)
        return ModelRunnerOutput(self.sampled)


def run(monkeypatch: pytest.MonkeyPatch, mask_time: float, forward_passes: int) -> tuple[float, float]:
    """Tokens of a request without and with a grammar, in the time of a forward pass."""
    config = EngineConfig.from_options(max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    scheduler = Scheduler(config.scheduler, config.cache, num_blocks=2000, max_model_len=4096)
    device: Any = Device()
    loop = StepLoop(scheduler, device, max_in_flight=2)

    def fill(step: Step, requests: dict[str, Request]) -> None:
        device.now += mask_time

    monkeypatch.setattr(loop_module.masks, "fill", fill)
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: device.now / 1000))
    requests = [make_request(name, 3, max_tokens=4000, ignore_eos=True) for name in ("plain", "masked", "plain 2", "masked 2")]
    for request in requests:
        request.matcher = AnyToken() if "masked" in request.request_id else None
        scheduler.add_request(request)
    while device.now < forward_passes * device.forward:
        loop.step()
    scheduler.check_integrity()
    return tuple(request.num_output_tokens / forward_passes for request in requests[:2])  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mask_time", "plain", "masked"),
    [(0.5, 0.97, 0.97), (6, 0.97, 0.97), (8, 0.85, 0.8), (12, 0.9, 0.5), (20, 0.65, 0.35)],
    ids=["short", "within the forward pass", "a little late", "late", "very late"],
)
def test_masks_that_are_late_hold_up_requests_with_a_grammar_alone(
    monkeypatch: pytest.MonkeyPatch, mask_time: float, plain: float, masked: float
) -> None:
    """Waiting for all masks would give (device.delay + mask_time) / forward: 0.61 tokens at 12 ms, 0.38 at 20 ms."""
    found = run(monkeypatch, mask_time, 1000)
    assert plain <= found[0] <= 1.01 and masked <= found[1] <= 1.01


def test_steps_are_together_again_after_some_apart_and_stay_so_if_apart_gained_little() -> None:
    for seconds_apart, is_apart_again in ((0.5, True), (0.9, False)):
        pace = MaskPace()
        for is_late in (True, True, False, *(True,) * 7):
            pace.note(1.0, is_late=is_late)
            assert not pace.is_apart
        pace.note(1.0, is_late=None)  # a step without masks says nothing
        pace.note(1.0, is_late=True)
        for _ in range(64):
            assert pace.is_apart
            pace.note(seconds_apart, is_late=False)
        assert not pace.is_apart
        for _ in range(8):
            pace.note(1.0, is_late=True)
        assert pace.is_apart == is_apart_again


def test_only_requests_whose_tokens_are_in_flight_leave_a_step_and_only_to_others() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    for name in ("masked", "plain"):
        request = make_request(name, 4)
        request.matcher = AnyToken() if name == "masked" else None
        scheduler.add_request(request)

    def names(plan: SchedulerOutput) -> list[str]:
        return [row.request_id for row in plan.rows]

    plans = [scheduler.schedule(masked_wait=True)]
    first = result_of(scheduler, plans[0])
    plans += [scheduler.schedule(masked_wait=True), scheduler.schedule(masked_wait=False)]
    assert [names(plan) for plan in plans] == [["masked", "plain"], ["plain"], ["masked", "plain"]]
    scheduler.start_over()
    scheduler.schedule(masked_wait=True)
    scheduler.start_over()
    plan = scheduler.schedule(masked_wait=True)
    scheduler.update_from_output(plan, first)
    assert names(scheduler.schedule(masked_wait=True)) == ["masked", "plain"]
    scheduler.fail_requests(["plain"], ErrorKind.INTERNAL, "it ends")
    assert names(scheduler.schedule(masked_wait=True)) == ["masked"]
