"""A sleeping engine holds no device memory and accepts no requests; after waking up it gives the same answers as before."""

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.profiler import Profiler
from jaxllm.errors import ConfigError, EngineError, EngineSleepingError, InvalidRequestError, ModelLoadError, OutOfMemoryError
from jaxllm.request import FinishReason
from tests.helpers import engines, goldens

NAME = "llama_gqa"
RESULTS = goldens.golden(NAME).results


def requests(count: int = 3, max_tokens: int = 6):
    return [engines.request(str(i), RESULTS[i].prompt, max_tokens=max_tokens) for i in range(count)]


def check_answers(core) -> None:
    answers = engines.run(core, requests())
    assert [answers[str(i)].tokens for i in range(3)] == [result.tokens[:6] for result in RESULTS[:3]]
    core.check_integrity()


@pytest.mark.parametrize("levels", [(1,), (2,), (1, 2), (2, 1)])
def test_the_same_tokens_come_after_waking_up(core, levels):
    check_answers(core)
    arrays = jax.tree.leaves((core.runner.params, core.runner.caches, core.runner.row_arrays))
    for level in levels:
        core.sleep(level)
    assert core.is_sleeping() and all(array.is_deleted() for array in arrays)
    core.wake_up()
    core.wake_up()
    assert not core.is_sleeping()
    check_answers(core)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_wake_up_by_themselves(core, level):
    core.sleep(level)
    core.wake_up(["weights"])
    assert core.is_sleeping() and core.runner.params and not core.runner.caches
    with pytest.raises(EngineSleepingError):
        core.add_request(requests()[0])
    core.sleep(1)  # what is awake sleeps again
    assert not core.runner.params
    core.wake_up(["kv_cache"])
    assert core.is_sleeping() and core.runner.caches and not core.runner.params
    with pytest.raises(InvalidRequestError, match="tags has 'kv', known are weights and kv_cache"):
        core.wake_up(["kv"])
    core.wake_up(["weights"])
    assert not core.is_sleeping()
    check_answers(core)


def test_weights_that_are_awake_stay_if_there_is_no_memory_for_the_cache(core, monkeypatch):
    core.sleep(1)
    core.wake_up(["weights"])
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "allocate_caches", lambda: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED: no")))
        with pytest.raises(OutOfMemoryError):
            core.wake_up()
    assert core.is_sleeping() and core.runner.params
    core.wake_up()
    check_answers(core)


def test_requests_that_come_while_the_engine_sleeps_are_refused(core):
    core.sleep()
    with pytest.raises(EngineSleepingError, match="wake it up"):
        core.add_request(requests()[0])
    assert not core.has_unfinished_requests() and core.step() == []
    core.wake_up()
    check_answers(core)


def test_unfinished_requests_are_aborted_or_keep_the_engine_awake(core):
    for request in requests(6, max_tokens=20):
        core.add_request(request)
    core.step()
    with pytest.raises(EngineError, match="6 requests are not finished"):
        core.sleep(mode="refuse")
    assert not core.is_sleeping()
    core.sleep()
    assert core.has_unfinished_requests()
    outputs = core.step()
    assert sorted(output.request_id for output in outputs) == list("012345")
    assert {output.finish_reason for output in outputs} == {FinishReason.ABORT} and not core.has_unfinished_requests()
    core.wake_up()
    check_answers(core)


@pytest.mark.parametrize("level", [0, 3, True, "1"])
def test_there_are_two_levels(core, level):
    with pytest.raises(InvalidRequestError, match="must be 1 .* or 2"):
        core.sleep(level)
    assert not core.is_sleeping()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("RESOURCE_EXHAUSTED: no"), OutOfMemoryError), (ModelLoadError("the file is gone"), ModelLoadError)],
    ids=["memory", "file"],
)
def test_an_engine_that_cannot_wake_up_sleeps_on_and_may_try_again(core, monkeypatch, error, raised):
    def fail(model_dir, progress):
        raise error

    core.sleep(2)
    with monkeypatch.context() as patch, pytest.raises(raised):
        patch.setattr(core.runner, "load_weights", fail)
        core.wake_up()
    assert core.is_sleeping()
    core.wake_up()
    check_answers(core)


def test_an_llm_sleeps(core):
    llm = LLM.from_config(core.config, core=core)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    iterator = llm.generate_iter([RESULTS[0].prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    next(iterator)
    llm.sleep(1)
    assert [output.outputs[0].finish_reason for _, output in iterator] == ["abort"]
    with pytest.raises(EngineSleepingError):
        llm.generate([RESULTS[0].prompt], params, use_tqdm=False)
    llm.wake_up()
    assert llm.generate([RESULTS[0].prompt], params, use_tqdm=False)[0].outputs[0].token_ids == RESULTS[0].tokens[:6]
    llm.llm_engine.check_integrity()


def test_a_trace_is_written_below_the_directory(core, tmp_path):
    core._profiler = Profiler(str(tmp_path))
    core.start_profile()
    with pytest.raises(EngineError, match="already"):
        core.start_profile()
    check_answers(core)
    core.stop_profile()
    with pytest.raises(EngineError, match="no trace"):
        core.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_without_a_directory_there_are_no_traces():
    with pytest.raises(ConfigError, match="--profiler-dir"):
        Profiler(None).start()
