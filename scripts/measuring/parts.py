"""Parts of a benchmark, each with a time limit, and the rows that they find, which are written as they come."""

import contextlib
import dataclasses
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from scripts.measuring.rows import figure, markdown_table

HEADER = ("work", "jaxllm", "goal", "note")


@dataclass(frozen=True)
class Row:
    """A line of the table. The goal is the most that is wanted, or with `more` the least."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    more: bool = False
    note: str = ""

    def cells(self) -> list[str]:
        goal = "–"
        if self.goal is not None:
            is_met = self.value >= self.goal if self.more else self.value <= self.goal
            goal = f"{'≥' if self.more else '≤'} {self.goal:g}: {'met' if is_met else 'missed'}"
        value = f"{self.value:.4f}" if self.unit == "×" else figure(self.value)
        return [self.name, f"{value} {self.unit}", goal, self.note]


class Rows:
    """The rows found so far."""

    def __init__(self, model: str, path: Path | None):
        """path: of a JSON file, written again with every row."""
        self.model, self.path = model, path
        self.rows: list[Row] = []

    def note(
        self, name: str, value: float, unit: str, goal: float | None = None, *, more: bool = False, note: str = ""
    ) -> None:
        """Keep and print a row, and write all of them."""
        self.rows.append(Row(name, value, unit, goal, more, note))
        print(" | ".join(self.rows[-1].cells()), flush=True)
        if self.path:
            found = {"device": device(), "model": self.model, "rows": list(map(dataclasses.asdict, self.rows))}
            self.path.write_text(json.dumps(found, indent=1))

    def table(self) -> str:
        """All of them as Markdown."""
        return f"**{self.model}** on {device()}\n\n{markdown_table(HEADER, [row.cells() for row in self.rows])}\n"


def run_parts(
    parts: Mapping[str, Callable[[], None]], *, seconds: float, part_seconds: float, after_failure: Callable[[], None]
) -> list[str]:
    """Run the parts one after the other; none begins after so many seconds. Those that were left out, failed or took too long, and why."""
    began, left_out = time.monotonic(), []
    for name, part in parts.items():
        if time.monotonic() > began + seconds:
            left_out.append(f"{name} (there was no time for it)")
            continue
        try:
            with limited(part_seconds):
                part()
        except Exception as problem:
            traceback.print_exc()
            left_out.append(f"{name} ({type(problem).__name__}: {problem})")
            after_failure()
    return left_out


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def device() -> str:
    return jax.devices()[0].device_kind  # type: ignore[no-any-return]
