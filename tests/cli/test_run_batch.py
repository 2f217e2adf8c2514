import errno
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.cli import running
from jaxllm.cli.main import main
from tests.helpers.scripted_core import fake_core


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, words_directory: Path) -> list[Any]:
    """The engine cores that runs opened, each of which outputs "one two"."""
    opened: list[Any] = []

    def open_async_llm(options: Any, progress: Any) -> AsyncLLM:
        opened.append(fake_core(words_directory, "one two", max_model_len=64))
        return AsyncLLM(core=opened[-1])

    monkeypatch.setattr(running, "open_async_llm", open_async_llm)
    return opened


def write(path: Path, *bodies: dict[str, Any]) -> Path:
    lines = [
        {"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": body} for place, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def batch(tmp_path: Path, *more: str) -> int:
    return main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *more])


def test_a_file_is_answered_and_then_only_what_is_new(
    cores: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", {"prompt": "one"}, {"prompt": "two"})
    assert batch(tmp_path) == 0
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [record["response"]["body"]["choices"][0]["text"] for record in records] == [" one two", " one two"]
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.splitlines()[-1] == "2 requests answered, 0 failed"
    write(tmp_path / "in", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"})
    assert batch(tmp_path) == 0
    assert len(cores[1].requests) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "1 request answered, 0 failed, 2 were there already"
    assert batch(tmp_path, "--overwrite", "-q") == 0
    assert len(cores[2].requests) == 3
    assert all(core.is_shut_down for core in cores)


def test_a_failed_request_is_counted_and_fails_no_other(
    cores: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", {"prompt": "one"}, {"prompt": []}, {"prompt": "one", "model": "m"})
    assert batch(tmp_path, "--served-model-name", "m", "-q") == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"2 requests answered, 1 failed; {tmp_path / 'out'} has the errors"
    statuses = [json.loads(line)["response"]["status_code"] for line in (tmp_path / "out").read_text().splitlines()]
    assert statuses == [200, 400, 200]


def test_keys_of_a_server_do_not_matter(cores: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_API_KEY", "secret")
    write(tmp_path / "in", {"prompt": "one"})
    assert batch(tmp_path) == 0


def test_wrong_use_is_told_before_a_model_is_loaded(
    cores: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(tmp_path) == 2
    assert "cannot read the input file" in capsys.readouterr().err
    write(tmp_path / "in", {"prompt": "one"})
    assert batch(tmp_path, "--max-in-flight", "0") == 2
    assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "in")]) in (1, 2)
    for name in ("-", "/dev/null"):
        assert main(["run-batch", "-i", name, "-o", str(tmp_path / "out")]) == 2
        assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", name]) == 2
        assert "must be a regular file" in capsys.readouterr().err
    (tmp_path / "out").write_text("a diary\n")
    assert batch(tmp_path) == 1
    assert "not the output of a batch" in capsys.readouterr().err
    assert not cores


def test_ctrl_c_keeps_what_is_done(cores: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from server.batch.output_file import BatchOutput

    write_record = BatchOutput.write

    def write_and_interrupt(self: BatchOutput, *arguments: Any, **options: Any) -> None:
        write_record(self, *arguments, **options)
        if len((tmp_path / "out").read_text().splitlines()) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BatchOutput, "write", write_and_interrupt)
    write(tmp_path / "in", *[{"prompt": "one"}] * 6)
    assert batch(tmp_path, "--max-in-flight", "1") == 130
    assert len((tmp_path / "out").read_text().splitlines()) >= 2


def test_a_full_disk_ends_the_run_with_what_is_done(
    cores: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from server.batch.output_file import BatchOutput

    write_record = BatchOutput.write

    def write_one(self: BatchOutput, *arguments: Any, **options: Any) -> None:
        if (tmp_path / "out").stat().st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_record(self, *arguments, **options)

    monkeypatch.setattr(BatchOutput, "write", write_one)
    write(tmp_path / "in", *[{"prompt": "one"}] * 3)
    assert batch(tmp_path) == 1
    assert "error: No space left on device" in capsys.readouterr().err
    assert len((tmp_path / "out").read_text().splitlines()) == 1 and cores[0].is_shut_down
