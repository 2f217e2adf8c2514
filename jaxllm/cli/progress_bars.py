"""Progress output: bars on a terminal, occasional lines in a log."""

import sys
import threading
import time
from typing import Any

from jaxllm.cli.terminal import counted, duration, size
from jaxllm.progress import SILENT, Progress

LINE_EVERY_SECONDS = 10.0


def make_progress(*, quiet: bool) -> Progress:
    """Choose no output, bars, or lines, from --quiet and the type of stderr."""
    if quiet:
        return SILENT
    return Bars() if sys.stderr.isatty() else Lines()


class Bars(Progress):
    """A bar with count, time left and, for bytes, speed. At the end it is replaced by a line with the total time."""

    def __init__(self) -> None:
        self._display: Any = None

    def start(self, task: str, total: int | None, unit: str) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        self.finish()
        in_bytes = unit == "B"
        counts: tuple[rich_progress.ProgressColumn, ...] = (
            (rich_progress.DownloadColumn(binary_units=True), rich_progress.TransferSpeedColumn())
            if in_bytes
            else (rich_progress.MofNCompleteColumn(), rich_progress.TextColumn(f"{unit}s"))
        )
        self._display = rich_progress.Progress(
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            *counts,
            rich_progress.TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._task, self._unit, self._began = task, unit, time.monotonic()
        self._display.start()
        self._bar = self._display.add_task(task, total=total)

    def advance(self, count: int = 1) -> None:
        if self._display is not None:
            self._display.advance(self._bar, count)

    def finish(self) -> None:
        if self._display is None:
            return
        display, self._display = self._display, None
        display.stop()
        done = int(display.tasks[0].completed)
        summary = _summary(self._task, done, self._unit, time.monotonic() - self._began)
        display.console.print(summary, style="dim", highlight=False)


class Lines(Progress):
    """`compiling: 17 of 35 programs, about 40 s left`, at most every ten seconds, and a line at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: str | None = None

    def start(self, task: str, total: int | None, unit: str) -> None:
        self.finish()
        self._task, self._total, self._unit, self._done = task, total, unit, 0
        self._began = self._spoke = time.monotonic()

    def advance(self, count: int = 1) -> None:
        with self._lock:
            if self._task is None:
                return
            self._done += count
            now = time.monotonic()
            if now - self._spoke < LINE_EVERY_SECONDS or self._done == self._total:
                return
            self._spoke = now
            line = f"{self._task}: {_amount(self._done, self._unit)}"
            if self._total and self._done:
                left = (now - self._began) * (self._total - self._done) / self._done
                line = f"{self._task}: {_of(self._done, self._total, self._unit)}, about {duration(max(left, 0.0))} left"
        print(line, file=sys.stderr, flush=True)

    def finish(self) -> None:
        with self._lock:
            task, self._task = self._task, None
        if task is not None:
            print(_summary(task, self._done, self._unit, time.monotonic() - self._began), file=sys.stderr, flush=True)


def _amount(done: int, unit: str) -> str:
    return size(done) if unit == "B" else counted(done, unit)


def _of(done: int, total: int, unit: str) -> str:
    return f"{size(done)} of {size(total)}" if unit == "B" else f"{done} of {counted(total, unit)}"


def _summary(task: str, done: int, unit: str, seconds: float) -> str:
    return f"{task}: {_amount(done, unit)} in {duration(seconds)}"
