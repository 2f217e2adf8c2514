import io
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm import log
from jaxllm.cli import chat, running
from jaxllm.cli.main import main
from jaxllm.errors import EngineDeadError
from tests.cli.conftest import Opened
from tests.helpers.tiny_tokenizers import write_tokenizer


def converse(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", *arguments])


def test_each_line_of_stdin_is_answered_with_the_conversation_before_it(
    opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, "one two\n\nthree\n", "--system", "ten", "--temperature", "0") == 0
    shown = capsys.readouterr()
    assert opened.words_of(0) == "<unk> ten <unk> one two"
    first = shown.out.splitlines()[0]
    assert first == " two one <unk> ten"
    assert opened.words_of(1) == f"<unk> ten <unk> one two <unk>{first} <unk> three"
    assert shown.err.count("tokens/s") == 2
    assert opened.core.requests[0].sampling_params.temperature == 0
    assert opened.core.requests[0].sampling_params.max_tokens > 16
    assert opened.core.is_shut_down


def test_chats_sample_as_llama_cpp_where_the_model_has_no_generation_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    opened = Opened(write_tokenizer(tmp_path, "words", chat_template="{{ messages[0]['content'] }}"))
    monkeypatch.setattr(running, "open_llm", opened.open_llm)
    for command in (["chat", "--top-k", "7", "--quick"], ["generate", "--chat", "--top-k", "7"]):
        log.info_once.cache_clear()
        assert main([*command, "one two"]) == 0
        params = opened.core.requests[-1].sampling_params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 7, 0.95, 0.05)
        told = "sampling: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (llama.cpp's defaults, as the model's generation_config.json is"
        assert told in capsys.readouterr().err
    assert main(["generate", "one two"]) == 0
    assert opened.core.requests[-1].sampling_params.temperature == 1 and "llama.cpp" not in capsys.readouterr().err


def test_three_quotes_hold_several_lines(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, '"""one\ntwo\nthree"""\n"""four\nfive', "-q") == 0
    assert opened.words_of(0) == "<unk> one two three"
    assert opened.words_of(1).endswith("<unk> four five")


def test_reset_forgets_all_but_the_system_message(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "/system ten\none\n/reset\ntwo\n/system\n/reset\nthree\n", "-q") == 0
    assert [opened.words_of(index) for index in (1, 2)] == ["<unk> ten <unk> two", "<unk> three"]


def test_a_conversation_is_saved_and_loaded(opened: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    assert converse(monkeypatch, f"one\n/save {path}\n", "-q") == 0
    saved = json.loads(path.read_text())
    assert saved == [{"role": "user", "content": "one"}, {"role": "assistant", "content": " one"}]
    assert converse(monkeypatch, f"/load {path}\ntwo\n", "-q") == 0
    assert opened.words_of(0) == "<unk> one <unk> one <unk> two"
    assert converse(monkeypatch, "two\n", "-q", "--load", str(path)) == 0
    assert opened.words_of(0) == "<unk> one <unk> one <unk> two"


def test_set_changes_sampling_values(opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert converse(monkeypatch, "/set top-k 4\n/set stop END\none\n/set\n", "-q") == 0
    params = opened.core.requests[0].sampling_params
    assert (params.top_k, params.stop) == (4, ["END"])
    assert "top_k = 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "unknown command '/rest'; did you mean '/reset'?"),
        ("/set temprature 1", "unknown sampling value 'temprature'; did you mean 'temperature'?"),
        ("/set temperature hot", "temperature: 'hot' is not a number"),
        ("/set top_p 7", "error: top_p is 7.0"),
        ("/save", "/save needs a file name"),
        ("/save /no/such/folder/x", "cannot write /no/such/folder/x"),
        ("/load /no/such", "cannot read /no/such"),
        ("one " * 80, "prompt has"),
    ],
)
def test_what_is_wrong_is_told_and_the_conversation_goes_on(
    opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert converse(monkeypatch, f"{line}\ntwo\n", "-q") == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == " two\n"
    assert opened.words_of(0) == "<unk> two"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened.press_ctrl_c(at_step=2)
    assert converse(monkeypatch, "one two three\nfour\n") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == " three two"
    assert opened.words_of(1) == "<unk> one two three <unk> three two <unk> four"
    assert "(stopped)" in shown.err
    assert len(opened.core.aborted) == 1


def test_a_dead_engine_ends_the_program(
    opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened.fail(1, EngineDeadError("the engine is dead"))
    assert converse(monkeypatch, "one\ntwo\n") == 1
    assert capsys.readouterr().err.endswith(")\nerror: the engine is dead\n")
    assert opened.core.is_shut_down


def test_ctrl_c_at_the_prompt_goes_on_and_ctrl_d_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    keys = iter(["hi", KeyboardInterrupt(), "there", EOFError()])

    def read(prompt: str) -> str:
        key = next(keys)
        if isinstance(key, BaseException):
            raise key
        return key

    assert list(chat._messages(read, interactive=True)) == ["hi", "there"]
    assert "(Ctrl-D leaves)" in capsys.readouterr().err


def test_the_model_may_be_named_without_a_flag(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "/exit\none\n", "some/model", "--system", "x") == 0
    assert opened.options == {"model": "some/model"}
    assert opened.core.requests == []
    assert converse(monkeypatch, "", "some/model", "--model", "other") == 2


def test_bad_saved_conversations_are_refused_before_the_model_is_loaded(
    opened: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk.json"
    for text, message in [("{", "is not JSON"), ("[1]", "must hold a list of objects with role and content")]:
        path.write_text(text)
        assert converse(monkeypatch, "one\n", "--load", str(path)) == 1
        assert message in capsys.readouterr().err
    assert opened.core is None
