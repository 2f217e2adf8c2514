"""Progress output: bars on a terminal, occasional lines in a log."""

import sys
import threading
import time
from typing import Any

from jaxllm.cli.terminal import counted, duration, note, size
from jaxllm.progress import SILENT, Progress

LINE_EVERY_SECONDS = 10.0


def make_progress(*, quiet: bool) -> Progress:
    """Choose no output, bars, or lines, from --quiet and the type of stderr."""
    if quiet:
        return SILENT
    return Bars() if sys.stderr.isatty() else Lines()


class Lines(Progress):
    """`compiling: 17 of 35 programs, about 40 s left`, at most every ten seconds, and a line with the total time at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: str | None = None

    def start(self, task: str, total: int | None, unit: str) -> None:
        self.finish()
        self._task, self._total, self._unit, self._done = task, total, unit, 0
        self._began = self._spoke = time.monotonic()

    def advance(self, count: int = 1) -> None:
        with self._lock:
            if self._task is not None:
                self._done += count
                self._show(count)

    def finish(self) -> None:
        with self._lock:
            task, self._task = self._task, None
        if task is not None:
            self._hide()
            note(f"{task}: {self._amount(self._done)} in {duration(time.monotonic() - self._began)}")

    def _amount(self, number: int) -> str:
        return size(number) if self._unit == "B" else counted(number, self._unit)

    def _show(self, count: int) -> None:
        """Show that the count has grown."""
        now = time.monotonic()
        if now - self._spoke < LINE_EVERY_SECONDS or self._done == self._total:
            return
        self._spoke = now
        line = f"{self._task}: {self._amount(self._done)}"
        if self._total and self._done:
            done = size(self._done) if self._unit == "B" else self._done
            left = (now - self._began) * (self._total - self._done) / self._done
            line = f"{self._task}: {done} of {self._amount(self._total)}, about {duration(max(left, 0.0))} left"
        note(line)

    def _hide(self) -> None:
        """Remove what is shown of a task that ends."""


class Bars(Lines):
    """A bar with count, time left and, for bytes, speed. At the end it is replaced by the line with the total time."""

    def start(self, task: str, total: int | None, unit: str) -> None:
        from rich import progress
        from rich.console import Console

        self.finish()
        counts: list[progress.ProgressColumn] = [progress.MofNCompleteColumn(), progress.TextColumn(f"{unit}s")]
        if unit == "B":
            counts = [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
        columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn(), *counts)
        left = progress.TimeRemainingColumn(compact=True)
        self._display: Any = progress.Progress(*columns, left, console=Console(stderr=True), transient=True)
        self._display.start()
        self._bar = self._display.add_task(task, total=total)
        super().start(task, total, unit)

    def _show(self, count: int) -> None:
        self._display.advance(self._bar, count)

    def _hide(self) -> None:
        self._display.stop()
