import shutil
from pathlib import Path

import pytest

import jaxllm
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, EngineDeadError, EngineError, InvalidRequestError, ModelLoadError
from jaxllm.llm_engine import LLMEngine
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers.scripted_core import fake_core

DEMO = Path(jaxllm.__file__).parent / "data" / "demo"
LONG = SamplingParams(max_tokens=50)


def engine_of(directory: Path, **options: object) -> LLMEngine:
    return LLMEngine(core=fake_core(directory, **options))


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_a_request_runs_step_by_step(model_directory: Path) -> None:
    engine = engine_of(model_directory)
    engine.add_request("r", "hi", LONG)
    outputs = run(engine)
    assert outputs[-1].request_id == "r" and outputs[-1].prompt == "hi" and outputs[-1].finished
    assert outputs[-1].outputs[0].text == "one two three" and outputs[-1].outputs[0].finish_reason == "stop"
    assert len(outputs) == len(outputs[-1].outputs[0].token_ids)


def test_params_default_to_the_generation_config(model_directory: Path) -> None:
    engine = engine_of(model_directory, script="one two three four five six")
    assert engine.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=4)
    engine.add_request("r", "hi")
    assert len(run(engine)[-1].outputs[0].token_ids) == 4


def test_a_stop_string_frees_the_request_in_the_core(model_directory: Path) -> None:
    engine = engine_of(model_directory)
    engine.add_request("r", "hi", SamplingParams(max_tokens=50, stop="two"))
    assert run(engine)[-1].outputs[0].text == "one "
    assert not engine.core.has_unfinished_requests() and engine.core.aborted  # type: ignore[attr-defined]


def test_aborting_frees_at_once_and_the_id_can_be_used_again(model_directory: Path) -> None:
    engine = engine_of(model_directory)
    for _ in range(3):
        engine.add_request("r", "hi", LONG)
        engine.add_request("r", "ho", SamplingParams(max_tokens=50, n=2))
        engine.step()
        outputs = engine.abort_request("r")
        assert [[answer.finish_reason for answer in output.outputs] for output in outputs] == [["abort"], ["abort", "abort"]]
        assert all(len(answer.token_ids) == 1 for output in outputs for answer in output.outputs)
        assert not engine.has_unfinished_requests() and not engine.core.has_unfinished_requests()
    assert engine.abort_request(["r", "unknown"]) == []


def test_a_mass_abort_leaves_nothing(model_directory: Path) -> None:
    engine = engine_of(model_directory)
    for number in range(100):
        engine.add_request(str(number), "hi", LONG)
    engine.step()
    assert len(engine.abort_request(map(str, range(100)))) == 100
    assert engine.get_num_unfinished_requests() == 0 and not engine.core.has_unfinished_requests()


def test_a_core_that_refuses_one_of_n_answers_gets_none(model_directory: Path) -> None:
    engine = engine_of(model_directory)
    core = engine.core
    add = core.add_request

    def refuse_third(request: object) -> None:
        if request.request_id.startswith("2_"):  # type: ignore[attr-defined]
            raise InvalidRequestError("too large for the cache")
        add(request)  # type: ignore[arg-type]

    core.add_request = refuse_third  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match="too large"):
        engine.add_request("r", "hi", SamplingParams(n=3))
    assert not core.has_unfinished_requests() and not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("raised", "seen", "message"),
    [
        (EngineDeadError("gone"), EngineDeadError, "gone"),
        (EngineError("bad step"), EngineError, "bad step"),
        (ValueError("oops"), EngineError, "a step failed: ValueError: oops"),
    ],
)
def test_a_failed_step_is_a_project_error_and_frees_the_requests(
    model_directory: Path, raised: Exception, seen: type[Exception], message: str
) -> None:
    engine = engine_of(model_directory)
    engine.add_request("r", "hi", LONG)

    def fail() -> None:
        raise raised

    engine.core.before_step = fail  # type: ignore[attr-defined]
    with pytest.raises(seen, match=message):
        engine.step()
    assert not engine.has_unfinished_requests() and not engine.core.has_unfinished_requests()


def test_outputs_of_a_request_aborted_meanwhile_are_dropped(model_directory: Path) -> None:
    engine = engine_of(model_directory)
    engine.add_request("r", "hi", SamplingParams(max_tokens=1))
    engine.core.before_step = lambda: engine.abort_request("r") and None  # type: ignore[attr-defined]
    assert engine.step() == []


def test_without_a_tokenizer_ids_go_in_and_out(tmp_path: Path, model_directory: Path) -> None:
    core = fake_core(model_directory, lambda request: [5, 6])
    config = EngineConfig.from_options(model=str(tmp_path), skip_tokenizer_init=True)
    engine = LLMEngine(config, core=core)
    engine.add_request("r", [1, 2], SamplingParams(max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY))
    assert run(engine)[0].outputs[0].token_ids == [5, 6]
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        engine.get_tokenizer()


def test_faults_in_the_small_files_come_before_the_core_is_built(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="not a model directory: it has no config.json"):
        LLMEngine.from_options(model=str(tmp_path))
    shutil.copy(DEMO / "config.json", tmp_path)
    with pytest.raises(ModelLoadError, match="tokenizer missing"):
        LLMEngine.from_options(model=str(tmp_path))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, which does not divide"):
        LLMEngine.from_options(model=str(tmp_path), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="chat_template"):
        LLMEngine.from_options(model=str(tmp_path), skip_tokenizer_init=True, chat_template="nothing.jinja")


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path, model_directory: Path) -> None:
    config = EngineConfig.from_options(model=str(tmp_path), tokenizer=str(model_directory))
    assert LLMEngine(config, core=fake_core(model_directory)).get_tokenizer().eos_token == "</s>"
