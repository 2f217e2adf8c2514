"""Output of a running `jaxllm bench scaling`: table rows on stdout, the current activity on stderr."""

import sys
import time
from typing import Any

from jaxllm.cli import terminal
from jaxllm.scaling import report, tables
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.processes import Hear
from jaxllm.scaling.rows import Results, Row, SizeResult, Skipped

MIN_WIDTH = 9


class Screen:
    """Receives results as they come."""

    def __init__(self, plan: Plan, results: Results, *, quiet: bool, has_table: bool):
        self._plan, self._rows = plan, list(results.rows)
        self._quiet, self._has_table = quiet, has_table
        self._is_terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._print_lines([list(tables.ROW_HEADER), *tables.main_table(plan, self._rows).lines])

    def begin(self, size: SizeResult) -> Hear:
        """The receiver for a size that begins."""
        number = size.tensor_parallel_size

        def hear(told: Any) -> None:
            if isinstance(told, str):
                self._say(f"{terminal.counted(number, 'device')}: {told}")
            elif isinstance(told, Row):
                self._rows.append(told)
                self._print_lines(tables.main_table(self._plan, self._rows).lines[-1:])
            elif isinstance(told, Skipped):
                self._note(f"{terminal.counted(number, 'device')}, {told} left out: {told.reason}")

        return hear

    def end(self) -> None:
        """End of the output."""
        self._clear()

    @staticmethod
    def summary(plan: Plan, results: Results) -> None:
        """Summarize the rows and list missing results."""
        named = [
            ("weak scaling", tables.weak_table(plan, results.rows)),
            ("where a step's time goes, ms", tables.parts_table(results)),
            ("all-reduces", tables.all_reduce_table(results)),
        ]
        for name, table in named:
            if table.lines:
                print(f"\n{name}")
                widths = [max(map(len, column)) for column in zip(table.header, *table.lines, strict=True)]
                for line in [table.header, *table.lines]:
                    print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        if short := report.in_short(plan, results):
            print("\n" + "\n".join(short))
        for size in results.sizes:
            if size.failure:
                terminal.note(f"tensor-parallel size {size.tensor_parallel_size} failed: {size.failure}", "red")

    def _print_lines(self, lines: list[list[str]]) -> None:
        if not self._has_table:
            return
        self._clear()
        for line in lines:
            cells = [
                cell.ljust(MIN_WIDTH) if name in tables.TEXTS else cell.rjust(max(MIN_WIDTH, len(name)))
                for name, cell in zip(tables.ROW_HEADER, line, strict=True)
            ]
            print("  ".join(cells).rstrip(), flush=True)

    def _say(self, text: str) -> None:
        """On a terminal a single line, updated in place, with the time since the start; else one line per activity."""
        if self._quiet:
            return
        line = f"[{terminal.duration(time.monotonic() - self._began)}] {text}"
        if self._is_terminal:
            self._clear()
            sys.stderr.write(terminal.styled(line, "dim", sys.stderr))
            sys.stderr.flush()
        else:
            terminal.note(line)

    def _note(self, text: str) -> None:
        if not self._quiet:
            self._clear()
            terminal.note(text, "red")

    def _clear(self) -> None:
        if self._is_terminal and not self._quiet:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
