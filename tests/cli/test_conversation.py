import asyncio
import io
import json
import os
import signal
from pathlib import Path

import pytest

from jaxllm.cli.main import main
from jaxllm.cli.streaming import printable
from tests.helpers.stub_server import Stub


@pytest.fixture
def stub(shared_stub: Stub) -> Stub:
    shared_stub.reset()
    return shared_stub


def chat(stub: Stub, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", "--url", stub.url, *arguments])


def test_a_server_answers_with_the_conversation_before_it(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--system", "brief", "--temperature", "0", "--max-tokens", "2", "--api-key", "secret"]
    assert chat(stub, monkeypatch, "one\n/set top_k 4\ntwo\n", *arguments) == 0
    shown = capsys.readouterr()
    assert shown.out == "word word \nword word \n"
    assert shown.err.count("7 prompt tokens, 2 output tokens") == 2
    first, second = stub.bodies
    assert first["messages"] == [{"role": "system", "content": "brief"}, {"role": "user", "content": "one"}]
    assert (first["model"], first["temperature"], first["max_completion_tokens"]) == ("stub", 0, 2) and "top_k" not in first
    assert second["messages"][2] == {"role": "assistant", "content": "word word "} and second["top_k"] == 4
    assert stub.headers[0]["authorization"] == "Bearer secret"


def test_reasoning_is_shown_beside_the_answer_and_not_kept(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stub.reasoning = "let me think"
    assert chat(stub, monkeypatch, f"one\n/save {tmp_path}/talk\n", "-q", "some-model") == 0
    shown = capsys.readouterr()
    assert shown.out == "word word word \n" and "let me think" in shown.err
    assert json.loads((tmp_path / "talk").read_text())[1]["content"] == "word word word "
    assert stub.bodies[0]["model"] == "some-model"


def test_a_refusal_is_told_and_the_conversation_goes_on(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.fail = lambda body: (400, {"error": {"message": "too long"}}) if len(stub.bodies) == 1 else None
    stub.break_after = lambda body: (1, "error") if len(stub.bodies) == 2 else None
    assert chat(stub, monkeypatch, "one\ntwo\nthree\n", "-q") == 1
    shown = capsys.readouterr()
    assert "error: HTTP 400: too long" in shown.err and "the engine died" in shown.err
    assert shown.out == "word \nword word word \n"
    assert [m["content"] for m in stub.bodies[2]["messages"]] == ["three"]


@pytest.mark.parametrize("named", [(), ("stub",), ("other",)])
def test_a_server_says_how_chats_sample_where_nothing_is_set(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: tuple[str, ...]
) -> None:
    stub.card = {"chat_sampling": {"temperature": 0.8, "top_k": 40}}
    assert chat(stub, monkeypatch, "one\n/set\n", "-q", "--top-k", "3", *named) == 0
    (body,) = stub.bodies
    assert (body.get("temperature"), body["top_k"]) == (None if named == ("other",) else 0.8, 3)
    assert ("temperature = 0.8" in capsys.readouterr().err) == ("temperature" in body)


def test_engine_options_are_refused(stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(stub, monkeypatch, "one\n", "--max-num-seqs", "4") == 2
    assert "--max-num-seqs is for a model in this process" in capsys.readouterr().err
    assert chat(stub, monkeypatch, "one\n", "--dry-run") == 2


def test_a_server_that_is_not_there_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot connect" in capsys.readouterr().err


def test_answers_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x9be\x07") == "a[2Jb\tc\nde"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gate(body: object) -> asyncio.Event | None:
        if len(stub.bodies) > 1:
            return None
        os.kill(os.getpid(), signal.SIGINT)
        return asyncio.Event()

    stub.gate = gate
    assert chat(stub, monkeypatch, "one\ntwo\n") == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("word word word \n") and "(stopped)" in shown.err
    assert stub.cut_off.wait(10)
    assert stub.bodies[1]["messages"][0]["content"] == "one"


def test_one_message_and_the_end(stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(stub, monkeypatch, "never read", "--quick", "one", "--system-prompt", "brief", "-q") == 0
    assert capsys.readouterr().out == "word word word \n"
    assert [message["content"] for message in stub.bodies[0]["messages"]] == ["brief", "one"] and len(stub.bodies) == 1


def test_the_model_may_be_named_as_vllm_does(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(stub, monkeypatch, "", "--quick", "one", "--model-name", "mine") == 0
    assert stub.bodies[0]["model"] == "mine"


def test_texts_are_written_on_one_by_one(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "--url", stub.url, "--quick", "one", "--max-tokens", "2", "-q"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n/three\n"))
    assert main(["complete", "--url", stub.url, "--model-name", "mine"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "word word \n" + "word word word \n" * 2 and "3 output tokens" in shown.err
    assert [(body["prompt"], body["model"]) for body in stub.bodies] == [("one", "stub"), ("two", "mine"), ("/three", "mine")]
    assert stub.bodies[0]["max_tokens"] == 2 and "max_completion_tokens" not in stub.bodies[0]
