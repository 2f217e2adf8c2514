"""Output of `jaxllm bench scaling`: rows on stdout as they come, activities on stderr, and a summary."""

import time

from jaxllm.cli import terminal
from jaxllm.scaling.results import Results, SizeResult
from jaxllm.scaling.tables import KERNELS, LIMITS, MEASUREMENTS, Table, tables


class Screen:
    """Shows results as they come."""

    def __init__(self, results: Results, *, quiet: bool, has_table: bool):
        self._results, self._quiet, self._has_table = results, quiet, has_table
        self._began = time.monotonic()
        self._print(tables(results)[MEASUREMENTS], with_header=True)

    def hear(self, size: int, message: SizeResult | str) -> None:
        """Show a part of a size's results, or what is done now. A part is in the results already."""
        if isinstance(message, str):
            if not self._quiet:
                elapsed = terminal.duration(time.monotonic() - self._began)
                terminal.note(f"[{elapsed}] {terminal.counted(size, 'device')}: {message}")
        elif message.rows:
            table = tables(self._results)[MEASUREMENTS]
            lines = [line for line in table.lines if line["tensor_parallel_size"] == size]
            self._print(Table(table.columns, lines[-len(message.rows) :]))

    def _print(self, table: Table, *, with_header: bool = False) -> None:
        if self._has_table:
            print(table.as_text(with_header=with_header), flush=True)


def print_summary(results: Results) -> None:
    """Print what all rows together say, and what is missing."""
    for heading, table in tables(results).items():
        if table.lines and heading not in (MEASUREMENTS, LIMITS, KERNELS):
            print(f"\n{heading}\n{table.as_text()}")
    for problem in results.problems:
        terminal.note(problem, "red")
