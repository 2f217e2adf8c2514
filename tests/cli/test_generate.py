import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli import generate
from jaxllm.cli.main import main
from jaxllm.errors import EngineDeadError
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import FinishReason
from tests.helpers.fake_engine_core import FakeEngineCore


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    return path


def test_one_prompt_streams_its_text_and_closes_with_statistics(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two three four"]) == 0
    shown = capsys.readouterr()
    assert shown.out == " four three two one\n"
    assert shown.err.splitlines()[-1].startswith("5 prompt tokens, 5 output tokens, time to first token ")
    assert shown.err.splitlines()[-1].endswith(" tokens/s")
    assert opened.core.is_shut_down


def test_options_reach_the_engine_and_sampling_values_the_request(opened: Any) -> None:
    assert main(["generate", "one two", "--max-num-seqs", "8", "--top-k", "3", "--stop", "x"]) == 0
    assert opened.options == {"max_num_seqs": 8}
    params = opened.core.requests[0].sampling_params
    assert (params.top_k, params.stop, params.temperature, params.max_tokens) == (3, ["x"], 0.5, 61)


def test_several_prompts_are_answered_in_order(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two three", "four", "five six"]) == 0
    assert capsys.readouterr().out == " three two one\n four\n six five\n"


def test_quiet_leaves_stderr_empty(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-q", "one", "two"]) == 0
    assert capsys.readouterr().err == ""


def test_json_has_a_line_per_prompt(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", "three", "--json", "--n", "2", "--logprobs", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert lines[0]["prompt"] == "one two"
    assert lines[0]["num_prompt_tokens"] == 3
    assert [answer["text"] for answer in lines[0]["outputs"]] == [" two one", " two one"]
    answer = lines[0]["outputs"][0]
    assert (len(answer["token_ids"]), answer["finish_reason"], answer["stop_reason"]) == (3, "stop", None)
    assert len(answer["logprobs"]) == 3
    assert answer["logprobs"][0][0]["logprob"] == -0.5
    assert answer["logprobs"][0][0]["decoded_token"].strip() == "two"


def test_a_file_sets_sampling_values_per_line(opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one two", "max_tokens": 1}\n{"prompt": "three four"}\n')
    assert main(["generate", "--file", str(path), "--temperature", "0", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == " two\n four three\n"
    assert [(r.sampling_params.max_tokens, r.sampling_params.temperature) for r in opened.core.requests] == [(1, 0.0), (9, 0.0)]


def test_chat_renders_messages(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "--system", "one two", "three four"]) == 0
    assert opened.words_of(0) == "<unk> one two <unk> three four"


def test_without_a_prompt_the_demo_prompt_runs(
    opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/null") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert main(["generate"]) == 0
    shown = capsys.readouterr()
    assert "def read_lines(path):" in shown.err
    assert shown.out.strip()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--system", "x", "a"], 2, "--system needs --chat"),
        (["a", "--file", "x.txt"], 2, "give prompts as arguments or with --file, not both"),
        (["a", "--logprobs", "2"], 2, "--logprobs shows only with --json"),
        (["a", "--skip-tokenizer-init"], 2, "add --json for token ids"),
        (["--file", "/no/such.txt"], 1, "cannot read the prompt file /no/such.txt"),
        (["a", "--gpu-memory-utilization", "2"], 1, "gpu_memory_utilization is 2.0, must be above 0 and at most 1"),
        (["a", "--temperature", "nan"], 1, "temperature is nan"),
        (["a", "--top-p", "0"], 1, "top_p is 0.0"),
        (["a", "--max-tokens", "0"], 1, "max_tokens is 0"),
        (["a", "--n", "100000"], 1, "n is 100000"),
        (["a", "--stop", ""], 1, "stop"),
        (["a", "--config", "/no/such.yaml"], 1, "cannot read the config file"),
        (["a", "-q", "-v"], 2, "not allowed with"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    opened: Any, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert opened.core is None


def test_a_bad_prompt_of_many_is_named_before_anything_runs(
    opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one", "", "two"]) == 1
    shown = capsys.readouterr()
    assert "1 of 3 prompts cannot be served, none was run: prompt 1: " in shown.err
    assert shown.out == ""
    assert opened.core is None
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt_token_ids": [1, 99999]}\n')
    assert main(["generate", "--file", str(path)]) == 1
    assert f"none was run: {path}:3: " in capsys.readouterr().err
    assert opened.core.requests == []
    assert opened.core.is_shut_down


@pytest.mark.parametrize(
    ("line", "options", "code", "fault"),
    [
        (b'{"prompt": ""}', [], 1, "prompt is empty"),
        (b'{"prompt_token_ids": [1, 99999]}', [], 1, "prompt has the token id 99999"),
        (b'{"prompt_token_ids": [1, 99999]}', ["--json"], 1, "prompt has the token id 99999"),
        (b'{"prompt": "one", "logprobs": 2}', [], 2, "--logprobs shows only with --json"),
        (b'{"prompt": "one", "detokenize": false}', [], 2, "without a tokenizer there is no text"),
        (b'{"prompt": "one\xff"}', [], 1, "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": 5}]}', [], 1, "message 0 has content of type int"),
    ],
)
def test_faults_of_a_file_name_the_line_also_of_the_only_one(
    opened: Any, tmp_path: Path, line: bytes, options: list[str], code: int, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n\n" + line + b"\n")
    assert main(["generate", "--file", str(path), *options]) == code
    shown = capsys.readouterr().err
    assert shown.count(f"{path}:3: ") == 1 and f"{path}:3: {fault}" in shown


def test_a_directory_of_a_model_before_the_prompts_is_the_model(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    Path("llama", "config.json").write_text("{}")
    assert main(["generate", "./llama", "one two"]) == 0
    assert opened.options == {"model": "./llama"} and capsys.readouterr().out == " two one\n"
    assert main(["generate", "llama", "--file", str(_written(tmp_path, "one two\n"))]) == 0
    assert opened.options == {"model": "llama"} and capsys.readouterr().out == " two one\n"
    assert main(["generate", "smollm2", "one two"]) == 0
    assert opened.options == {"model": "smollm2"} and capsys.readouterr().out == " two one\n"
    assert main(["generate", "--model", "other", "./llama"]) == 0
    assert opened.options == {"model": "other"} and len(opened.core.requests) == 1


@pytest.mark.parametrize(("prompt", "is_told"), [("./lama", True), ("Qwen/Qwen3-0.6B", True), ("one / two", False)])
def test_a_prompt_that_looks_like_a_model_is_told(
    opened: Any, prompt: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", prompt, "one"]) == 0
    assert (f"{prompt!r} is taken for a prompt; name a model with --model\n" in capsys.readouterr().err) == is_told
    assert main(["generate", prompt, "--model", "x", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_one_answer_with_what_was_written(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    opened.press_ctrl_c(at_step=3)
    assert main(["generate", "one two three four five"]) == 130
    shown = capsys.readouterr()
    assert shown.out == " five four three\n"
    assert "interrupted: 0 of 1 prompts were finished" in shown.err
    assert len(opened.core.aborted) == 1


def test_ctrl_c_while_a_part_of_an_answer_is_written_waits_for_it(
    opened: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdout(io.StringIO):
        def write(self, text: str) -> int:
            if "three" in text:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    out = Stdout()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", "one two three four five"]) == 130
    assert out.getvalue() == " five four three\n"
    shown = capsys.readouterr().err
    assert "6 prompt tokens, 3 output tokens" in shown
    assert "interrupted: 0 of 1 prompts were finished" in shown


def test_ctrl_c_while_an_answer_is_printed_neither_repeats_nor_loses_one(
    opened: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_answer = generate._print_answer

    def print_and_interrupt(index: int, *arguments: Any, **options: Any) -> None:
        print_answer(index, *arguments, **options)
        if index == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate, "_print_answer", print_and_interrupt)
    assert main(["generate", "one two", "two three four five", "six seven"]) == 130
    shown = capsys.readouterr()
    assert shown.out == " two one\n seven six\n", "one step finished both of these"
    assert "interrupted: 2 of 3 prompts were finished" in shown.err
    assert len(opened.core.aborted) == 1


def test_ctrl_c_ends_a_batch_with_the_answers_that_were_finished(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    opened.press_ctrl_c(at_step=3)
    assert main(["generate", "one", "two three four five", "six seven"]) == 130
    shown = capsys.readouterr()
    assert shown.out == " one\n seven six\n"
    assert "interrupted: 2 of 3 prompts were finished" in shown.err
    assert "5 prompt tokens, 5 output tokens" in shown.err
    assert len(opened.core.aborted) == 1


def test_an_engine_error_loses_no_finished_answer(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    opened.fail(3, EngineDeadError("out of luck"))
    assert main(["generate", "one two three", "four"]) == 1
    shown = capsys.readouterr()
    assert shown.out == " four\n"
    assert shown.err.splitlines()[-1] == "error: out of luck"


def test_an_engine_error_is_one_line_and_a_traceback_only_with_v(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    opened.fail(1, EngineDeadError("the engine is dead: out of luck"))
    assert main(["generate", "one", "-q"]) == 1
    assert capsys.readouterr().err == "error: the engine is dead: out of luck\n"
    assert main(["generate", "a", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert opened.core.is_shut_down


def test_a_request_that_fails_alone_is_told_and_the_others_are_printed(
    opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advance = FakeEngineCore._advance

    def fail_second(core: FakeEngineCore, running: Any) -> EngineCoreOutput:
        if running.request is not core.requests[1]:
            return advance(core, running)
        del core.running[running.request.request_id]
        return EngineCoreOutput(running.request.request_id, [], FinishReason.ERROR, "bad luck")

    monkeypatch.setattr(FakeEngineCore, "_advance", fail_second)
    assert main(["generate", "one", "two", "three"]) == 1
    shown = capsys.readouterr()
    assert shown.out == " one\n\n three\n"
    assert "error: prompt 1: bad luck" in shown.err


def test_the_seed_of_a_run_seeds_every_request(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "one"}\n{"prompt": "one", "seed": 99}\n')

    def seeds(seed: str) -> list[int | None]:
        assert main(["generate", "--file", str(path), "--seed", seed]) == 0
        return [request.sampling_params.seed for request in opened.core.requests]

    first, second, own = seeds("5")
    assert first != second and own == 99
    assert seeds("5") == [first, second, 99]
    assert first not in seeds("6")


def test_too_many_logprobs_are_refused_before_anything_is_loaded(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--json", "--logprobs", "21"]) == 1
    assert "logprobs is 21, but this engine reports at most 20" in capsys.readouterr().err
    assert opened.core is None
    main(["generate", "one", "--json", "--logprobs", "21", "--max-logprobs", "30"])
    assert opened.core is not None


def test_a_line_that_is_not_json_is_named_with_its_column(
    opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    assert main(["generate", "--file", str(path)]) == 1
    assert capsys.readouterr().err == f"error: {path}:2: not JSON: Expecting value at column 12\n"
    assert opened.core is None


def test_a_request_error_names_its_line(opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "top_p": 2}\n')
    assert main(["generate", "--file", str(path)]) == 1
    assert "p.jsonl:2: top_p is 2" in capsys.readouterr().err
    assert opened.core is None
