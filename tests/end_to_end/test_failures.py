"""Failures in a step end it cleanly: an error of the project, no block lost, no hanging."""

import itertools
import signal
from collections import defaultdict

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.loop import StepLoop
from jaxllm.errors import ConfigError, EngineDeadError, OutOfMemoryError
from jaxllm.request import FinishReason
from tests.helpers import engines, goldens

NAME = "llama_gqa"
RESULTS = goldens.golden(NAME).results
PROMPTS = [result.prompt for result in RESULTS]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def first():
    core = engines.make_core(NAME)
    engines.run(core, [engines.request("a", PROMPTS[0], max_tokens=3)])
    yield core
    core.shutdown()


@pytest.fixture
def core(first):
    """An engine that a test may break."""
    core = engines.twin(first)
    yield core
    core.shutdown()


def requests(max_tokens: int = 20):
    return [engines.request(str(i), prompt, max_tokens=max_tokens) for i, prompt in enumerate(PROMPTS)]


def fail_at(step: int, error: BaseException, call):
    """`call` that raises at its n-th use."""
    count = 0

    def failing(*args):
        nonlocal count
        count += 1
        if count == step:
            raise error
        return call(*args)

    return failing


class Failing:
    """A step on its way that will not arrive."""

    def __init__(self, error: BaseException):
        self.error = error

    def result(self):
        raise self.error


class Interrupted:
    """A step in flight, with Ctrl-C while it is waited for the first time."""

    def __init__(self, pending):
        self.pending = pending
        self.waits = 0

    def result(self):
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        return self.pending.result()


def interrupt_the_wait(core, monkeypatch, step: int) -> None:
    dispatch, count = core.runner.dispatch, itertools.count(1)

    def dispatching(plan):
        pending = dispatch(plan)
        return Interrupted(pending) if next(count) == step else pending

    monkeypatch.setattr(core.runner, "dispatch", dispatching)


def check_dead(core) -> None:
    engines.check_idle(core)
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()
    with pytest.raises(EngineDeadError, match="dead"):
        core.add_request(engines.request("later", PROMPTS[0]))
    with pytest.raises(EngineDeadError, match="dead"):
        core.step()
    core.abort_requests(["0"])


FATAL = RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: boom")


@pytest.mark.parametrize("where", ["dispatch", "result"])
def test_an_error_after_which_the_device_is_lost_ends_the_engine(core, monkeypatch, where):
    runner = core.runner
    if where == "dispatch":
        monkeypatch.setattr(runner, "dispatch", fail_at(5, FATAL, runner.dispatch))
    else:
        dispatch, steps = runner.dispatch, []
        monkeypatch.setattr(
            runner, "dispatch", lambda plan: (steps.append(dispatch(plan)), Failing(FATAL) if len(steps) == 5 else steps[-1])[1]
        )
    for request in requests():
        core.add_request(request)
    with pytest.raises(EngineDeadError, match="boom") as raised:
        for _ in range(30):
            core.step()
    assert raised.value.__cause__ is FATAL
    check_dead(core)


def test_llm_raises_and_then_fails_fast(core, monkeypatch):
    llm = LLM.from_config(core.config, core=core)
    monkeypatch.setattr(core.runner, "dispatch", fail_at(4, FATAL, core.runner.dispatch))
    with pytest.raises(EngineDeadError, match="boom"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    check_dead(core)
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_abort_of_running_and_waiting_requests(first, async_scheduling):
    core = engines.reschedule(first, async_scheduling=async_scheduling)
    scheduler, (rows,) = core.scheduler, core.runner.rows

    def abort(step: int, answers: dict[str, engines.Answer]) -> None:
        if step == 6:
            assert [request.request_id for request in scheduler.running] == ["0", "1", "2", "3"]
            free = scheduler.cache_manager.pool.num_free_blocks
            held = scheduler.cache_manager.num_blocks_of("1") + scheduler.cache_manager.num_blocks_of("3")
            core.abort_requests(["1", "3", "5", "nobody", "1"])
            assert scheduler.cache_manager.pool.num_free_blocks == free + held
        if step == 10:
            assert set(rows.by_request) == {"0", "2", "4"}

    answers = engines.run(core, requests(), after_step=abort)
    for i in (0, 2, 4):
        assert answers[str(i)].tokens == RESULTS[i].tokens[:20]
    for i in (1, 3, 5):
        assert answers[str(i)].finish_reason is None and len(answers[str(i)].tokens) < 10
    again = engines.run(core, requests())
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in again.values())
    assert [again[str(i)].tokens for i in range(6)] == [result.tokens[:20] for result in RESULTS]


def test_abort_of_everything_with_steps_in_flight(first):
    core = engines.reschedule(first)
    for request in requests():
        core.add_request(request)
    for _ in range(3):
        core.step()
    core.abort_requests([str(i) for i in range(6)])
    engines.check_idle(core)
    assert core.reset_prefix_cache()
    while core.has_unfinished_requests():
        assert core.step() == []
    answer = engines.run(core, [engines.request("next", PROMPTS[5], max_tokens=20)])["next"]
    assert answer.tokens == RESULTS[5].tokens[:20]
    assert set(core.runner.rows[0].by_request) == {"next"}


def test_reset_of_the_prefix_cache_under_running_requests(first):
    core = engines.reschedule(first)

    def reset(step: int, answers: dict[str, engines.Answer]) -> None:
        if step in (0, 3, 9):
            assert not core.reset_prefix_cache()
            assert core.reset_prefix_cache(reset_running_requests=True)

    answers = engines.run(core, requests(), after_step=reset)
    assert [answers[str(i)].tokens for i in range(6)] == [result.tokens[:20] for result in RESULTS]


def interrupted(core, monkeypatch, step: int):
    """A step of the core during which Ctrl-C arrives."""

    def press(*args):
        signal.raise_signal(signal.SIGINT)

    count = 0
    real = core.step

    def stepping():
        nonlocal count
        count += 1
        if count == step:
            press()
        return real()

    monkeypatch.setattr(core, "step", stepping)


def test_ctrl_c_leaves_a_usable_engine(core, monkeypatch):
    llm = LLM.from_config(core.config, core=core)
    interrupted(core, monkeypatch, step=5)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    engines.check_idle(core)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [result.tokens[:20] for result in RESULTS]
    engines.check_idle(core)


def test_an_interrupt_inside_a_step_leaves_a_usable_engine(core, monkeypatch):
    """As a second Ctrl-C does while the first still waits for the step."""
    llm = LLM.from_config(core.config, core=core)
    interrupt_the_wait(core, monkeypatch, step=5)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    engines.check_idle(core)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [result.tokens[:20] for result in RESULTS]


def test_an_interrupted_step_loses_nothing(core, monkeypatch):
    interrupt_the_wait(core, monkeypatch, step=5)
    for request in requests():
        core.add_request(request)
    tokens, num_interrupts = defaultdict(list), 0
    while core.has_unfinished_requests():
        try:
            for output in core.step():
                tokens[output.request_id] += output.new_token_ids
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert [tokens[str(i)] for i in range(6)] == [result.tokens[:20] for result in RESULTS]
    engines.check_idle(core)


def test_generate_iter_closed_early_frees_its_requests(core):
    llm = LLM.from_config(core.config, core=core)
    outputs = llm.generate_iter(PROMPTS, GREEDY)
    next(outputs)
    outputs.close()
    engines.check_idle(core)
    assert llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == RESULTS[3].tokens[:20]


def test_a_pool_too_small_is_refused_with_the_numbers():
    with pytest.raises(OutOfMemoryError, match="needs 7 blocks"):
        engines.make_core(NAME, num_gpu_blocks_override=7)


def test_an_attention_implementation_that_cannot_serve_the_model_is_refused_at_once():
    with pytest.raises(ConfigError, match="width 8"):
        engines.make_core(NAME, attention_implementation="triton")


def test_a_shut_down_engine_says_so(first):
    core = engines.twin(first)
    core.add_request(requests()[0])
    core.step()
    core.shutdown()
    check_dead(core)
    assert isinstance(core.loop, StepLoop)
