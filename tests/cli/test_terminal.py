import io
import re
from typing import Any

import pytest

from jaxllm.cli import progress_bars
from jaxllm.cli.progress_bars import Bars, Lines, make_progress
from jaxllm.cli.terminal import RunStats, duration, size, styled
from jaxllm.progress import SILENT, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal_and_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert styled("x", "red", Terminal()) == "\033[31mx\033[0m"
    assert styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", Terminal()) == "x"


def test_one_answer_is_timed_after_its_first_token() -> None:
    stats = RunStats(num_prompt_tokens=1, num_output_tokens=11, first_token_seconds=[3.0], total_seconds=5.0)
    assert stats.line() == "1 prompt token, 11 output tokens, time to first token 3.00 s, 5.0 tokens/s"


def test_a_batch_is_timed_as_a_whole() -> None:
    stats = RunStats(num_prompt_tokens=8, num_output_tokens=20, first_token_seconds=[0.1, 0.2, 0.6], total_seconds=5.0)
    assert stats.line() == "8 prompt tokens, 20 output tokens, time to first token 200 ms (median), 4.0 tokens/s"
    assert RunStats().line() == "0 prompt tokens, 0 output tokens, 0.0 tokens/s"


def test_times_and_sizes_are_readable() -> None:
    assert [duration(seconds) for seconds in (0.0421, 3.14159, 125)] == ["42 ms", "3.14 s", "2 min 5 s"]
    assert [size(number) for number in (512, 3 * 2**20, 2**34, 2**41)] == ["512 B", "3.0 MiB", "16.0 GiB", "2.0 TiB"]


def test_progress_is_silent_when_quiet_and_lines_without_a_terminal() -> None:
    assert make_progress(quiet=True) is SILENT
    assert isinstance(make_progress(quiet=False), Lines)


def test_lines_come_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: next(clock))
    lines = Lines()
    lines.start("compiling", 35, "program")
    for _ in range(3):
        lines.advance(5)
    lines.finish()
    lines.finish()
    assert capsys.readouterr().err == "compiling: 10 of 35 programs, about 50.00 s left\ncompiling: 15 programs in 22.00 s\n"


def test_bars_show_counts_and_leave_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    progress: Any = make_progress(quiet=False)
    assert isinstance(progress, Bars)
    progress.start("loading", 2 * 2**20, "B")
    progress.advance(2**20)
    progress.start("compiling", 3, "program")
    progress.advance()
    progress.finish()
    progress.advance()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stderr.getvalue())
    assert "loading: 1.0 MiB in" in text
    assert "1/3" in text
    assert "compiling: 1 program in" in text


def test_the_base_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.start("x", None, "y")
    progress.advance()
    progress.finish()
    assert capsys.readouterr() == ("", "")
