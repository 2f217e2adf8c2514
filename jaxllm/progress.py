"""Progress reports of long work. A caller that displays them (the command line) passes a subclass; the base class is silent."""

from collections.abc import Callable
from typing import Self


class Progress:
    """One task at a time: `start`, `advance` as often as needed, `finish`. This base shows nothing.

    As a context manager it finishes at the end, so that the display is removed before an error is printed.
    `advance` may be called from any thread; `start` and `finish` come from one.
    """

    def start(self, task: str, total: int | None, unit: str) -> None:
        """A task begins, e.g. `start("compiling", 35, "program")`.

        `total` is None where the end is not known; `unit` is a noun in the singular, or "B" for bytes.
        """

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""

    def finish(self) -> None:
        """The task is over, whether or not all of it was done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


SILENT = Progress()


def bytes_loaded(progress: Progress) -> Callable[[int, int], None]:
    """A callback (bytes done, bytes in all) that reports how far weights are loaded."""
    last = 0

    def report(done: int, total: int) -> None:
        nonlocal last
        if last == 0:
            progress.start("loading weights", total, "B")
        progress.advance(done - last)
        last = done

    return report
