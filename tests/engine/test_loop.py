"""The loop with a fake runner: order of dispatching and reading."""

import random
import time

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.loop import LARGE_STEP_TOKENS, StepLoop
from jaxllm.request import EngineCoreRequest, Request, RequestStatus
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput
from tests.helpers import engines
from tests.helpers.fake_tier import FakeTier
from tests.helpers.scheduling import make_request, make_scheduler
from tests.scheduler.test_drafts import AllDrafts


class FakeRunner:
    """Samples token 7 for every request that has computed all its known tokens, and records what happens when."""

    def __init__(self):
        self.events = []
        self.known = {}
        self.fails = False
        self.wait = lambda: None

    def dispatch(self, plan):
        step = sum(event[0] == "dispatch" for event in self.events)
        self.events.append(("dispatch", step))
        for new in plan.new_requests:
            self.known[new.request_id] = len(new.token_ids)
        sampled = {row.request_id: [7] for row in plan.rows if row.start + row.num_tokens >= self.known[row.request_id]}
        return FakePending(self, step, sampled)


class FakePending:
    was_sampled_late = False

    def __init__(self, runner, step, sampled):
        self.runner, self.step, self.sampled = runner, step, sampled

    def result(self):
        self.runner.events.append(("read", self.step))
        self.runner.wait()
        if self.runner.fails:
            raise RuntimeError("the device failed")
        return ModelRunnerOutput(self.sampled, num_drafts=dict.fromkeys(self.sampled, 0))


def make_loop(max_in_flight, runner=None):
    config = EngineConfig.from_options(
        max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=max_in_flight > 1, enable_prefix_caching=False
    )
    scheduler = Scheduler(config.scheduler, config.cache, num_blocks=20, max_model_len=64)
    return StepLoop(scheduler, runner or FakeRunner(), max_in_flight=max_in_flight)


def run(loop, num_tokens, max_steps=100):
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    loop.scheduler.add_request(Request(EngineCoreRequest(request_id="a", prompt_token_ids=[1, 2, 3], sampling_params=params)))
    tokens = []
    for _ in range(max_steps):
        if not loop.has_work:
            return tokens
        for output in loop.step():
            tokens += output.new_token_ids
    raise AssertionError("the request never ended")


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_request_gets_exactly_its_tokens_and_no_step_too_many(max_in_flight):
    loop = make_loop(max_in_flight)
    assert run(loop, 5) == [7] * 5
    assert loop.executor.events.count(("dispatch", 4)) == 1 and ("dispatch", 5) not in loop.executor.events
    loop.scheduler.check_integrity()


def test_the_next_step_is_dispatched_before_the_last_one_is_read():
    loop = make_loop(2)
    run(loop, 4)
    events = loop.executor.events
    for step in range(3):
        assert events.index(("dispatch", step + 1)) < events.index(("read", step))


def test_without_async_scheduling_each_step_is_read_before_the_next():
    loop = make_loop(1)
    run(loop, 3)
    assert loop.executor.events == [(what, step) for step in range(3) for what in ("dispatch", "read")]


@pytest.mark.parametrize(("step_seconds", "depth"), [(0.001, 3), (0.01, 2)])
def test_only_short_steps_fill_a_loop_of_three(monkeypatch, step_seconds, depth):
    now = [0.0]
    monkeypatch.setattr("jaxllm.engine.loop.time.perf_counter", lambda: now[0])
    loop = make_loop(3)

    def wait():
        now[0] += step_seconds

    loop.executor.wait = wait
    run(loop, 20)
    before = loop.executor.events[: loop.executor.events.index(("read", 10))]
    assert sum(what == "dispatch" for what, _ in before) - 10 == depth


@pytest.mark.parametrize(("long_tokens", "num_ahead"), [(28, 2), (29, 3)])
def test_no_third_step_is_dispatched_behind_one_of_many_tokens(monkeypatch, long_tokens, num_ahead):
    """A prompt of 60 tokens takes steps of 32 and 28."""
    monkeypatch.setattr("jaxllm.engine.loop.LONG_STEP_TOKENS", long_tokens)
    loop = make_loop(3)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    loop.scheduler.add_request(Request(EngineCoreRequest(request_id="a", prompt_token_ids=[1] * 60, sampling_params=params)))
    loop.step()
    assert loop.executor.events == [*(("dispatch", step) for step in range(num_ahead)), ("read", 0)]


class TimedRunner(FakeRunner):
    """A device whose steps take a millisecond for each token, in virtual time."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.now = self.free = self.idle = 0.0
        self.seconds_per_token = 0.001
        self.plans = []
        monkeypatch.setattr("jaxllm.engine.loop.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("jaxllm.engine.loop.time.sleep", self.sleep)
        monkeypatch.setattr("jaxllm.engine.loop.LARGE_STEP_TOKENS", 16)

    def sleep(self, seconds):
        self.now += seconds

    def dispatch(self, plan):
        self.plans.append([row.request_id for row in plan.rows])
        pending, began = super().dispatch(plan), max(self.now, self.free)
        self.idle += began - self.free
        self.free = end = began + self.seconds_per_token * plan.num_tokens
        result = pending.result

        def timed():
            self.now = max(self.now, end)
            return result()

        pending.result = timed
        return pending


def make_timed_loop(monkeypatch, lead_seconds, drafts=None):
    config = EngineConfig.from_options(max_num_seqs=9, max_num_batched_tokens=64, enable_prefix_caching=False)
    scheduler = Scheduler(config.scheduler, config.cache, num_blocks=40, max_model_len=64, drafts=drafts)
    return StepLoop(scheduler, TimedRunner(monkeypatch), max_in_flight=2, lead_seconds=lead_seconds)


def add_prompt(loop, name, num_tokens=20, max_tokens=30):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = EngineCoreRequest(request_id=name, prompt_token_ids=[1] * num_tokens, sampling_params=params)
    loop.scheduler.add_request(Request(request))


def start_prompt(loop, name):
    """Add a prompt, and step until the step that computes it is the only one in flight."""
    add_prompt(loop, name)
    while not any(name in plan for plan in loop.executor.plans):
        loop.step()
    while len(loop._in_flight) > 1 or loop._in_flight[0][0].rows[-1].request_id != name:
        loop.step()


@pytest.mark.parametrize(("lead_seconds", "rows_of_lead", "joins"), [(0.004, 64, True), (None, 64, False), (0.004, 0.5, False)])
def test_a_request_that_comes_while_a_prompt_is_computed_takes_part_in_the_next_step(
    monkeypatch, lead_seconds, rows_of_lead, joins
):
    monkeypatch.setattr("jaxllm.engine.loop.ROWS_OF_LEAD", rows_of_lead)
    loop = make_timed_loop(monkeypatch, lead_seconds)
    runner = loop.executor
    for name in "abc":
        start_prompt(loop, name)  # the first is alone and teaches nothing; the second takes 21 ms, the third 22
    began, num_before = runner.now, len(runner.plans)
    assert loop.step() == [] or not joins
    if joins:
        assert runner.now == pytest.approx(began + 0.75 * 0.021) and len(runner.plans) == num_before
    add_prompt(loop, "d")
    loop.step()
    assert ("d" in runner.plans[num_before]) is joins
    assert runner.idle == 0.0


def test_the_scheduler_knows_to_which_sizes_steps_are_padded():
    core = engines.make_core("llama_gqa", warmup="lazy", token_buckets=(16, 48), max_num_batched_tokens=64, load_format="dummy")
    assert core.scheduler.limits.token_sizes == core.runner.buckets.tokens == (16, 48, 64)
    core.shutdown()


def test_no_step_is_awaited_whose_tokens_are_drafts(monkeypatch):
    loop = make_timed_loop(monkeypatch, 0.004, AllDrafts(5, share_right=0.0))
    for name in "abcd":
        add_prompt(loop, name, num_tokens=2)
    for _ in range(10):
        num_before = len(loop.executor.plans)
        loop.step()
        assert len(loop.executor.plans) > num_before
    loop.scheduler.check_integrity()


def test_no_step_is_awaited_that_takes_less_time_than_it_did(monkeypatch):
    loop = make_timed_loop(monkeypatch, 0.004)
    runner = loop.executor
    for name in "ab":
        start_prompt(loop, name)
    runner.seconds_per_token /= 4
    for name in "cd":
        start_prompt(loop, name)
        loop.step()
        loop.step()
    idle = runner.idle
    assert 0.0 < idle < 0.02, "the device waited once"
    for name in "efgh":
        start_prompt(loop, name)
        loop.step()
        loop.step()
    assert runner.idle == idle
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_forgetting_waits_for_every_step_in_flight_even_one_that_fails(max_in_flight):
    loop = make_loop(max_in_flight)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    loop.scheduler.add_request(Request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=params)))
    loop.step()
    loop.executor.fails = True
    loop.forget()
    assert loop.executor.events == [
        *(("dispatch", step) for step in range(max_in_flight)),
        *(("read", step) for step in range(max_in_flight)),
    ]
    loop.forget()


def test_a_step_whose_reading_was_interrupted_is_read_again():
    loop = make_loop(1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    loop.scheduler.add_request(Request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=params)))
    loop.executor.fails = True
    with pytest.raises(RuntimeError):
        loop.step()
    loop.executor.fails = False
    assert [output.new_token_ids for _ in range(2) for output in loop.step()] == [[7], [7]]
    assert not loop.has_work


class MaskedPending(FakePending):
    def __init__(self, runner, step, sampled):
        super().__init__(runner, step, sampled)
        self.sampled_ids = list(sampled)
        self.mask_TW = np.full((len(sampled), 4), -1, np.int32)
        self.width = 1

    def drafts(self):
        return [[]] * len(self.sampled_ids)

    def sample(self):
        self.runner.events.append(("sample", self.step))


class MaskingRunner(FakeRunner):
    def dispatch(self, plan):
        pending = super().dispatch(plan)
        return MaskedPending(self, pending.step, pending.sampled) if plan.masked_request_ids else pending


class AnyToken:
    """Follows an output under no grammar."""

    is_done = False

    def __init__(self, events):
        self.events = events

    def advance(self, token_id):
        self.events.append(("advance", token_id))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_masked_step_is_sampled_when_the_tokens_before_it_are_known_and_none_follows_it_before(max_in_flight):
    loop = make_loop(max_in_flight, runner := MaskingRunner())
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for name in ("masked", "plain"):
        request = Request(EngineCoreRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=params))
        request.matcher = AnyToken(runner.events) if name == "masked" else None
        loop.scheduler.add_request(request)
    while loop.has_work:
        loop.step()
    sampled = [step for kind, step in runner.events if kind == "sample"]
    assert sampled == list(range(5))
    for step in sampled:
        place = runner.events.index(("sample", step))
        before = runner.events[:place]
        assert sum(kind == "advance" for kind, _ in before) == step  # each token so far
        assert ("dispatch", step) in before and ("dispatch", step + 1) not in before
        if max_in_flight > 1 and step:
            assert before.index(("dispatch", step)) < before.index(("read", step - 1))


def test_a_masked_step_that_was_never_sampled_can_be_forgotten():
    loop = make_loop(2, MaskingRunner())
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    request = Request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=params))
    request.matcher = AnyToken([])
    loop.scheduler.add_request(request)
    loop.step()
    loop.executor.fails = True
    with pytest.raises(RuntimeError, match="the device failed"):
        loop.step()
    loop.forget()
    loop.executor.fails = False
    loop.scheduler.start_over()
    while loop.has_work:
        loop.step()
    assert request.num_output_tokens == 5


def test_a_loop_with_nothing_but_blocks_to_wait_for_waits_for_them_and_then_copies_them():
    tier = FakeTier(random.Random(1), max_steps=0)
    scheduler = make_scheduler(num_blocks=20, block_size=4, max_model_len=64, tiers=(tier,))
    loop = StepLoop(scheduler, FakeRunner(), max_in_flight=2)
    request = make_request("a", [1] * 9, max_tokens=2)
    scheduler.add_request(request)
    tier.contents = {name: ["content"] for name in request.block_hashes}
    tier.is_stuck = True
    for count in range(1, 4):
        assert loop.step() == [] and loop.has_work and tier.num_waits == count
    assert not loop.executor.events and request.status is RequestStatus.WAITING_FOR_BLOCKS
    tier.is_stuck = False
    tokens = [token for _ in range(10) for output in loop.step() for token in output.new_token_ids]
    assert tokens == [7, 7] and request.num_cached_tokens == 8 and tier.num_waits == 3 and not loop.has_work


def test_tiers_learn_how_long_prompts_take_though_each_runs_alone():
    """A prompt of one step never follows another step. Requests behind one another must not load what is computed faster."""
    tier, noted = FakeTier(random.Random(1)), []
    tier.note_step = lambda num_tokens, seconds: noted.append((num_tokens, seconds))
    loop = StepLoop(make_scheduler(num_blocks=80, tiers=(tier,), async_scheduling=True), FakeRunner(), max_in_flight=2)
    loop.executor.wait = lambda: time.sleep(0.01)
    for number, length in enumerate((LARGE_STEP_TOKENS, LARGE_STEP_TOKENS - 1, 2 * LARGE_STEP_TOKENS)):
        loop.scheduler.add_request(make_request(f"{number}", [number] * length, max_tokens=1))
        while loop.has_work:
            loop.step()
    assert [num_tokens for num_tokens, _ in noted] == [LARGE_STEP_TOKENS, 2 * LARGE_STEP_TOKENS]
    assert all(seconds >= 0.01 for _, seconds in noted)
