import dataclasses
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import request_processor
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, EngineDeadError, EngineError, InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.outputs import EngineCoreOutput, RequestOutput
from jaxllm.request import FinishReason
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import echo, fake_core
from tests.helpers.stand_in_media import StandInProcessor, picture, stand_in_media

LONG = SamplingParams(max_tokens=50)


def llm_of(directory: Path, script: Any = "one two three", **options: Any) -> LLM:
    core = fake_core(directory, script, **options)
    return LLM.from_config(core.config, core=core)


def core_of(llm: LLM) -> FakeEngineCore:
    assert isinstance(llm.llm_engine.core, FakeEngineCore)
    return llm.llm_engine.core


def is_clean(llm: LLM) -> bool:
    return not core_of(llm).has_unfinished_requests() and not llm.llm_engine.has_unfinished_requests()


def test_answers_come_in_the_order_of_the_prompts(model_directory: Path) -> None:
    # The last prompts finish first.
    llm = llm_of(model_directory, lambda request: [request.prompt_token_ids[-1]] * (20 - request.prompt_token_ids[-1]) + [1])
    outputs = llm.generate([[5, last] for last in range(2, 12)], LONG, use_tqdm=False)
    assert [output.prompt_token_ids[-1] for output in outputs] == list(range(2, 12))
    assert all(output.outputs[0].token_ids[0] == output.prompt_token_ids[-1] for output in outputs)
    assert all(output.finished for output in outputs) and is_clean(llm)


@pytest.mark.parametrize("policy, num_first", [("fcfs", 6), ("priority", 9)])
def test_the_first_step_begins_with_the_prompts_that_fill_the_steps_in_flight(
    model_directory: Path, policy: str, num_first: int
) -> None:
    llm = llm_of(model_directory, scheduling_policy=policy, max_num_batched_tokens=32, enable_chunked_prefill=True)
    counts: list[int] = []

    def step() -> list[EngineCoreOutput]:
        counts.append(llm.llm_engine.get_num_unfinished_requests())
        return FakeEngineCore.step(core_of(llm))

    llm.llm_engine.core.step = step  # type: ignore[method-assign]
    assert len(llm.generate([[5] * 16] * 9, LONG, use_tqdm=False)) == 9
    assert counts[0] == num_first and is_clean(llm)


def test_prompts_of_every_form(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    ids = llm.get_tokenizer().encode("hi")
    for prompts, count in (
        ("hi", 1),
        (["hi"], 1),
        (ids, 1),
        ([ids, ids], 2),
        ({"prompt": "hi"}, 1),
        (["hi", {"prompt_token_ids": ids}], 2),
    ):
        outputs = llm.generate(prompts, LONG, use_tqdm=False)  # type: ignore[arg-type]
        assert [output.prompt_token_ids for output in outputs] == [ids] * count
        assert outputs[0].outputs[0].text == "one two three"
    assert llm.generate([], LONG, use_tqdm=False) == []


def test_lists_of_params_and_priorities_must_match(model_directory: Path) -> None:
    llm = llm_of(model_directory, scheduling_policy="priority")
    outputs = llm.generate(
        ["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], use_tqdm=False, priority=[3, 1]
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert [request.options.priority for request in core_of(llm).requests] == [3, 1]
    with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [LONG], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], LONG, use_tqdm=False, priority=[1, 2, 3])


def test_params_default_to_the_model_s_own(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    llm.generate("hi", use_tqdm=False)
    params = core_of(llm).requests[0].sampling_params
    assert (params.temperature, params.max_tokens) == (0.5, 4)


def test_bad_prompts_are_named_before_anything_runs(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    with pytest.raises(
        InvalidRequestError,
        match=r"2 of 4 prompts.*none was run: prompt 1: prompt is empty.*prompt 3: prompt has the token id -1",
    ):
        llm.generate(["fine", "", "fine", [-1]], LONG, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="^prompt is empty"):
        llm.generate("", LONG, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="and 2 more"):
        llm.generate([""] * 12, LONG, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="prompts is a int"):
        llm.generate(3, LONG, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="1 of 2 prompts"):
        llm.generate_iter(["", "fine"])
    assert core_of(llm).requests == []


def test_chat_uses_the_template_and_never_doubles_bos(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    tokenizer = llm.get_tokenizer()
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, LONG, use_tqdm=False)
    assert one.prompt == "<s><|user|>hi</s><|assistant|>"
    assert one.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    assert one.prompt_token_ids == tokenizer.apply_chat_template(talk, add_generation_prompt=True)
    assert len(llm.chat([talk, talk], LONG, use_tqdm=False)) == 2
    (custom,) = llm.chat(
        talk,
        LONG,
        use_tqdm=False,
        chat_template="{{ x }}{{ tools[0].name }}",
        chat_template_kwargs={"x": 1},
        tools=[{"name": "f"}],
    )
    assert custom.prompt == "1f"
    with pytest.raises(InvalidRequestError, match="1 of 2 conversations.*conversation 1: messages is empty"):
        llm.chat([talk, []], LONG, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="messages is a str"):
        llm.chat(["hi"], LONG, use_tqdm=False)  # type: ignore[list-item]


def test_chats_have_images_as_data_urls_and_objects(model_directory: Path) -> None:
    llm = llm_of(model_directory, interleave_mm_strings=True)
    (placeholder_id,) = llm.get_tokenizer().encode("<|user|>", add_special_tokens=False)
    llm.llm_engine.input_processor.media = media = stand_in_media(StandInProcessor(placeholder_id, "<|user|>"))
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}},
        {"type": "image_pil", "image_pil": picture(1, 2)},
        {"type": "text", "text": "b"},
    ]
    talk = [{"role": "user", "content": parts}]
    one, two = llm.chat(
        [talk, talk], LONG, use_tqdm=False, chat_template="{{ messages[0].content }}", mm_processor_kwargs={"k": 1}
    )
    assert one.prompt == two.prompt == "a\n<|user|>\n<|user|>\nb"
    assert one.prompt_token_ids.count(placeholder_id) == 5
    assert [(item.num_tokens, item.payload) for item in core_of(llm).requests[0].items] == [(3, b"\0\0\1"), (2, b"\0\0")]
    assert media._processor.prepared[0][1] == {"k": 1}  # type: ignore[union-attr, attr-defined]
    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,?"}]}]
    with pytest.raises(InvalidRequestError, match=r"conversation 1: messages\[0\].content\[0\] is not valid base64"):
        llm.chat([talk, broken], LONG, use_tqdm=False)


def test_a_chat_with_images_is_refused_by_a_model_of_text_alone(model_directory: Path) -> None:
    talk = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}]}]
    with pytest.raises(InvalidRequestError, match="takes text alone, and no images"):
        llm_of(model_directory).chat(talk, LONG, use_tqdm=False)


def test_a_chat_template_option_is_the_default(model_directory: Path) -> None:
    llm = llm_of(model_directory, chat_template="{{ messages[0].content }}!")
    assert llm.chat([{"role": "user", "content": "hi"}], LONG, use_tqdm=False)[0].prompt == "hi!"


def test_the_bar_counts_prompts_and_tokens(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any):
            calls.append(options["total"])

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            calls.append(text)

        def update(self, count: int) -> None:
            calls.append(count)

        def close(self) -> None:
            calls.append("closed")

    llm = llm_of(model_directory)
    llm.generate(["a", "b"], LONG, use_tqdm=Bar)
    assert calls[0] == 2 and calls[2] == calls[4] == 1 and calls[-1] == "closed" and "tok/s" in calls[1]
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], LONG)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    quiet = llm_of(model_directory, use_progress_bar=False)
    quiet.generate(["a", "b"], LONG)
    quiet.chat([{"role": "user", "content": "a"}], LONG)
    assert capsys.readouterr().err == ""
    quiet.generate("a", LONG, use_tqdm=True)
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_outputs_stream(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
    texts = ["", ""]
    for place, output in llm.generate_iter(["a", "b"], params):
        texts[place] += output.outputs[0].text
    assert texts == ["one two three"] * 2


def test_closing_the_iterator_frees_what_is_left(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    outputs = llm.generate_iter(["a", "b", "c"], LONG)
    next(outputs)
    outputs.close()
    assert is_clean(llm) and len(core_of(llm).aborted) == 3


def test_iterators_may_be_nested(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    texts = []
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY)
    for _, output in llm.generate_iter(["a", "b"], params):
        inner = llm.generate("c", LONG, use_tqdm=False)
        assert inner[0].outputs[0].text == "one two three"
        texts.append(output.outputs[0].text)
    assert texts.count("one two three") == 2 and is_clean(llm) and not llm._strays


def test_ctrl_c_ends_the_run_after_the_step_and_leaves_the_engine_clean(model_directory: Path) -> None:
    llm = llm_of(model_directory, lambda request: [7] * request.prompt_token_ids[-1] + [1])
    core, finished = core_of(llm), []
    steps_ended = []

    def interrupt() -> None:
        if core.num_steps == 3:
            signal.raise_signal(signal.SIGINT)
            steps_ended.append(True)  # the step goes on

    core.before_step = interrupt
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY)
    with pytest.raises(KeyboardInterrupt):
        for place, _ in llm.generate_iter([[5, 2], [5, 20]], params):
            finished.append(place)
    assert steps_ended and finished == [0], "the answer that this very step finished was lost"
    assert is_clean(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    core.before_step = lambda: None
    assert llm.generate([[5, 2]], LONG, use_tqdm=False)[0].finished


def test_a_second_ctrl_c_does_not_wait(model_directory: Path) -> None:
    llm = llm_of(model_directory)

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

    core_of(llm).before_step = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", LONG, use_tqdm=False)
    assert is_clean(llm)


def test_a_failed_step_ends_the_run_and_frees_everything(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    core = core_of(llm)

    def fail() -> None:
        raise EngineDeadError("out of luck")

    core.before_step = fail
    with pytest.raises(EngineDeadError, match="out of luck"):
        llm.generate(["a", "b"], LONG, use_tqdm=False)
    assert is_clean(llm)


def test_a_request_that_fails_alone_is_named(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(model_directory, echo)
    core = core_of(llm)
    step = core.step

    def failing_step() -> list[EngineCoreOutput]:
        outputs = step()
        if core.num_steps > 1:
            return outputs
        core.running.pop(outputs[1].request_id)
        return [outputs[0], EngineCoreOutput(outputs[1].request_id, [], FinishReason.ERROR, "logits are NaN")]

    monkeypatch.setattr(core, "step", failing_step)
    with pytest.raises(EngineError, match="prompt 1 of 2 failed: logits are NaN"):
        llm.generate(["a", "b"], LONG, use_tqdm=False)
    assert is_clean(llm)
    core.num_steps = 0
    outputs = dict(llm.generate_iter(["a", "b"], LONG))
    assert [outputs[place].outputs[0].finish_reason for place in (0, 1)] == ["stop", "error"]


def test_options_are_the_engine_s(monkeypatch: pytest.MonkeyPatch, model_directory: Path) -> None:
    seen = []

    def build(config: EngineConfig, progress: Any, processors: Any, times: Any) -> FakeEngineCore:
        seen.append((config, progress, processors))
        return fake_core(model_directory)

    monkeypatch.setattr("jaxllm.llm_engine._build_core", build)
    monkeypatch.setattr("jaxllm.llm_engine.check_model", lambda *_: None)
    LLM(
        model=str(model_directory),
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
        max_model_len=64,
        dtype="float32",
        seed=3,
        trust_remote_code=False,
        enforce_eager=False,
        disable_log_stats=True,
        logits_processors=["a processor"],  # type: ignore[list-item]
    )
    assert seen[0][0].parallel.tensor_parallel_size == 2 and seen[0][1] is not None and seen[0][2] == ["a processor"]
    with pytest.raises(ConfigError, match="unknown engine option 'max_num_sequences'; did you mean 'max_num_seqs'"):
        LLM(model=str(model_directory), max_num_sequences=3)
    with pytest.raises(
        ConfigError, match="decode_context_parallel_size=2 is refused .only 1 is taken.: the devices that split"
    ):
        LLM(model=str(model_directory), decode_context_parallel_size=2)


def test_the_names_that_scripts_for_vllm_use(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import jaxllm

    built: list[EngineConfig] = []
    monkeypatch.setattr("jaxllm.llm_engine._build_core", lambda config, *_: built.append(config) or fake_core(model_directory))
    monkeypatch.setattr("jaxllm.llm_engine.check_model", lambda *_: None)
    options: dict[str, Any] = {
        "enforce_eager": True,
        "trust_remote_code": True,
        "dtype": "half",
        "swap_space": 4,
        "enable_sleep_mode": True,
        "compilation_config": {"level": 3},
        "override_generation_config": {"temperature": 0.25},
        "max_seq_len_to_capture": 8192,
        "structured_outputs_config": {"backend": "xgrammar"},
        "model_impl": "auto",
        "disable_custom_all_reduce": True,
        "served_model_name": "mine",
        "enable_lora": False,
    }
    args = jaxllm.AsyncEngineArgs(str(model_directory), **options)
    assert args.dtype == "float16" and args.create_engine_config().model.dtype == "float16"
    llm = LLM(str(model_directory), **options)
    jaxllm.LLMEngine.from_engine_args(args)
    LLM(**dataclasses.asdict(args))
    assert len(built) == 3 and built[0] == built[1] == built[2]
    assert llm.get_default_sampling_params().temperature == 0.25
    assert "enforce_eager=True changes nothing here: every step is a compiled program" in caplog.text
    assert llm.generate(jaxllm.TextPrompt(prompt="a b"), LONG, use_tqdm=False, lora_request=None)
    assert llm.generate(jaxllm.TokensPrompt(prompt_token_ids=[5]), LONG, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="start it with enable_lora=True"):
        llm.generate("a", lora_request=jaxllm.LoRARequest("sql", 1, str(model_directory)))
    assert jaxllm.AsyncLLMEngine is jaxllm.AsyncLLM


def test_guided_decoding_is_the_older_name_of_structured_outputs() -> None:
    import jaxllm

    older = SamplingParams(guided_decoding=jaxllm.GuidedDecodingParams(choice=["a", "b"]))
    assert older == SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="older name"):
        SamplingParams(guided_decoding=older.structured_outputs, structured_outputs=older.structured_outputs)


def test_a_context_manager_shuts_down(model_directory: Path) -> None:
    with llm_of(model_directory) as llm:
        assert llm.reset_prefix_cache() is True
        core = core_of(llm)
    assert core.is_shut_down
    with pytest.raises(EngineDeadError):
        llm.generate("a", LONG, use_tqdm=False)


def test_metrics_tell_what_was_done(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    outputs = llm.generate(["a", "b"], LONG, use_tqdm=False)
    metrics = {(metric.name, metric.labels.get("finished_reason")): metric for metric in llm.get_metrics()}
    assert metrics["jaxllm:generation_tokens", None].value == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert metrics["jaxllm:prompt_tokens", None].value == sum(len(output.prompt_token_ids) for output in outputs)
    assert metrics["jaxllm:request_success", "stop"].value == 2
    assert metrics["jaxllm:time_to_first_token_seconds", None].count == 2
    with pytest.raises(ConfigError, match="disable_log_stats"):
        llm_of(model_directory, disable_log_stats=True).get_metrics()


def test_steps_do_not_ask_for_the_load_each_and_none_is_of_long_ago(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(model_directory, "word " * 40)
    core = core_of(llm)
    loads: list[int] = []

    def stats() -> SchedulerStats:
        loads.append(core.num_steps)
        return FakeEngineCore.stats(core)

    monkeypatch.setattr(core, "stats", stats)
    monkeypatch.setattr(request_processor, "time", SimpleNamespace(monotonic=lambda: 0.03 * core.num_steps))
    llm.generate("a", LONG, use_tqdm=False)
    assert core.num_steps > 30
    assert loads == [*range(1, core.num_steps, 4), core.num_steps], "as often as every 0.1 s, and at the end"
    running = [metric.value for metric in llm.llm_engine.snapshot() if metric.name == "jaxllm:num_requests_running"]  # type: ignore
    assert running == [0]


def test_an_engine_may_tell_of_every_second_token_alone(model_directory: Path) -> None:
    llm = llm_of(model_directory, "one two three four five", stream_interval=2)
    deltas = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
    counts = [len(output.outputs[0].token_ids) for _, output in llm.generate_iter("a", deltas)]
    assert counts[0] == 1 and set(counts[1:-1]) == {2}


def test_enqueued_prompts_are_computed_when_they_are_waited_for(model_directory: Path) -> None:
    llm = llm_of(model_directory, echo)
    ids = llm.enqueue([[5], [6]], LONG)
    ids += llm.enqueue([7], LONG, priority=0, use_tqdm=False)
    ids += llm.enqueue_chat([{"role": "user", "content": "hi"}], LONG, chat_template="{{ messages[0]['content'] }}")
    assert len(set(ids)) == 4 and llm.llm_engine.get_num_unfinished_requests() == 4
    assert llm.generate([8], LONG, use_tqdm=False)[0].outputs[0].token_ids[0] == 8  # takes no output of the others
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids[0] for output in outputs[:3]] == [5, 6, 7]
    assert llm.wait_for_completion(use_tqdm=False) == [] and is_clean(llm)
    llm.enqueue([5], LONG)
    with pytest.raises(TypeError, match="is a RequestOutput, not <class 'int'>"):
        llm.wait_for_completion(int, use_tqdm=False)


def test_enqueued_prompts_that_a_failed_step_has_ended_are_not_waited_for(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    llm.enqueue(["a", "b"], LONG)

    def fail() -> None:
        core_of(llm).before_step = lambda: None
        raise RuntimeError("boom")

    core_of(llm).before_step = fail
    with pytest.raises(EngineError, match="boom"):
        llm.generate("c", LONG, use_tqdm=False)
    with pytest.raises(EngineError, match="a step that failed during another call"):
        llm.wait_for_completion(use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == [] and is_clean(llm)


def test_tokenization_kwargs_say_how_texts_become_tokens(model_directory: Path) -> None:
    llm = llm_of(model_directory, max_model_len=16)
    tokenizer = llm.get_tokenizer()
    plain, whole = tokenizer.encode("a b c d", add_special_tokens=False), tokenizer.encode("a b c d")
    for kwargs, wanted in (
        ({"add_special_tokens": False}, plain),
        ({"truncate_prompt_tokens": 2}, whole[-2:]),
        ({"truncation": True, "max_length": 2, "truncation_side": "right"}, whole[:2]),
        ({"truncate_prompt_tokens": -1}, whole),
    ):
        for prompt in ("a b c d", {"prompt": "a b c d"}):
            assert llm.generate(prompt, LONG, tokenization_kwargs=kwargs, use_tqdm=False)[0].prompt_token_ids == wanted  # type: ignore[arg-type]
    long = llm.chat([{"role": "user", "content": "a " * 50}], LONG, tokenization_kwargs={"truncate_prompt_tokens": 3})
    assert len(long[0].prompt_token_ids) == 3
    for wrong, message in (({"padding": True}, "has 'padding'"), ({"truncate_prompt_tokens": 0}, "at least 1")):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate("a", LONG, tokenization_kwargs=wrong)


def test_the_world_is_all_devices(model_directory: Path) -> None:
    llm = llm_of(model_directory, tensor_parallel_size=2, data_parallel_size=3)
    assert llm.get_world_size() == 6 and llm.get_world_size(include_dp=False) == 2
    llm = llm_of(model_directory, tensor_parallel_size=2, data_parallel_size=3, enable_expert_parallel=True)
    assert llm.get_world_size() == 6 and llm.get_world_size(include_dp=False) == 2


def test_names_of_vllm_without_a_counterpart_say_why() -> None:
    import jaxllm

    assert jaxllm.PromptType == jaxllm.text.input_processor.Prompt  # type: ignore[attr-defined]
    for name in ("PoolingOutput", "EmbeddingOutput", "ScoringOutput", "ClassificationOutput"):
        assert getattr(jaxllm, name).__name__ == name
    with pytest.raises(ImportError, match="entry point of the group jaxllm.models"):
        from jaxllm import ModelRegistry  # type: ignore[attr-defined]  # noqa: F401
