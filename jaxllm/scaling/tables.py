"""The tables of a scaling experiment: the same cells for the terminal, report.md, report.html and results.csv."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.scaling.figures import Point, points
from jaxllm.scaling.plan import STRONG, WEAK, Plan
from jaxllm.scaling.rows import DECODE, MIXED, PARTS, PREFILL, Breakdown, Results, Row

NOT_MEASURED = "–"
UNITS = {DECODE: "ms/token", PREFILL: "prompt tok/s", MIXED: "output tok/s"}
TEXTS = ("work", "unit", "note", "by", "type")
"""Left-aligned columns."""
HIDDEN = ("hidden_communication_ms", "waiting_ms", "gaps_ms")
CSV_COLUMNS = (
    *("tensor_parallel_size", "work", "num_requests", "num_prompt_tokens", "num_tokens", "num_steps", "seconds", "ms_per_step"),
    *("tokens_per_second", "tokens_per_second_per_device", "strong_speed_up", "strong_efficiency", "weak_requests_per_device"),
    *("weak_speed_up", "weak_efficiency", "least_seconds", "share_of_limit", "mean_context", "dispatch_ms", "launch_ms"),
    *("wait_ms", *(f"{part}_ms" for part in PARTS), *HIDDEN, "note"),
)
Columns = Mapping[str, Callable[[Any], Any]]
_SPEEDS: Columns = {
    "tok/s": lambda of: number(of.row.tokens_per_second),
    "tok/s/device": lambda of: number(of.row.tokens_per_second_per_device),
    "speed-up": lambda of: NOT_MEASURED if of.base is None else f"{of.speed_up:.2f}",
    "efficiency": lambda of: NOT_MEASURED if of.base is None else f"{of.efficiency:.0%}",
    "of the limit": lambda of: share(of.row.share_of_limit),
}
_ROWS: Columns = {
    "devices": lambda of: of.row.tensor_parallel_size,
    "work": lambda of: of.row.work,
    "requests": lambda of: of.row.num_requests,
    "result": lambda of: number(of.row.ms_per_step if of.row.work == DECODE else of.row.tokens_per_second),
    "unit": lambda of: UNITS[of.row.work],
    **_SPEEDS,
    "launch ms": lambda of: number(of.row.host_ms.get("launch")),
    "note": lambda of: of.row.note or "",
}
_WEAK: Columns = {
    "requests per device": lambda of: of.num_requests,
    "devices": lambda of: of.row.tensor_parallel_size,
    "requests": lambda of: of.row.num_requests,
    "ms/token": lambda of: number(of.row.ms_per_step),
    **_SPEEDS,
}
_ALL_REDUCES: Columns = {
    "devices": lambda of: of.tensor_parallel_size,
    "by": lambda of: of.implementation,
    "rows": lambda of: of.rows,
    "width": lambda of: of.width,
    "bytes": lambda of: f"{of.num_bytes:,}".replace(",", " "),
    "µs": lambda of: number(of.seconds * 1e6),
    "bus GB/s": lambda of: number(of.bus_bytes_per_second / 1e9),
    "per step": lambda of: of.per_step,
    "ms per step": lambda of: number(of.seconds * of.per_step * 1e3),
}
_LIMITS: Columns = {
    "devices": lambda of: of.tensor_parallel_size,
    "copy TB/s": lambda of: number(of.limits["copy_bytes_per_second"] / 1e12),
    "product TFLOP/s": lambda of: number(of.limits["gemm_flops_per_second"] / 1e12),
    "type": lambda of: of.limits["gemm_dtype"],
    "weights read per step GB": lambda of: number(of.engine["read_bytes_per_step"] / 1e9 if of.engine else None),
    "cache kB/token": lambda of: number(of.engine["cache_bytes_per_token"] / 1e3 if of.engine else None),
    "start s": lambda of: number(of.engine.get("start_seconds")),
}


class Table(NamedTuple):
    """Cells as text."""

    header: tuple[str, ...]
    lines: list[list[str]]

    @classmethod
    def of(cls, columns: Columns, items: Iterable[Any]) -> "Table":
        return cls(tuple(columns), [[str(cell(item)) for cell in columns.values()] for item in items])


ROW_HEADER = tuple(_ROWS)


def main_table(plan: Plan, rows: Sequence[Row]) -> Table:
    """Every row, by size and work."""
    strong = {id(point.row): point for point in points(plan, rows) if point.scaling == STRONG}
    return Table.of(_ROWS, (strong.get(id(row)) or _Alone(row) for row in rows))


class _Alone(NamedTuple):
    """A row with nothing to compare it with."""

    row: Row
    base: None = None


def weak_table(plan: Plan, rows: Sequence[Row]) -> Table:
    """Decodes with the same number of requests for each device."""
    weak = [point for point in points(plan, rows) if point.scaling == WEAK]
    return Table.of(_WEAK, sorted(weak, key=lambda point: (point.num_requests, point.row.tensor_parallel_size)))


def parts_table(results: Results) -> Table:
    """Milliseconds of a step by what runs in them."""
    launches = {_key(row): row.host_ms.get("launch") for row in results.rows}

    def part(name: str) -> Callable[[Breakdown], str]:
        return lambda of: number(of.parts_ms[name])

    columns: Columns = {
        "devices": lambda of: of.tensor_parallel_size,
        "work": lambda of: of.work,
        "requests": lambda of: of.num_requests,
        "step ms": lambda of: number(of.step_ms),
        **{name: part(name) for name in PARTS[:-1]},
        "waiting": lambda of: number(of.waiting_ms),
        PARTS[-1]: part(PARTS[-1]),
        "gaps": lambda of: number(of.gaps_ms),
        "kernels": lambda of: f"{of.launches:.0f}",
        "launch ms": lambda of: number(launches.get(_key(of))),
        "traced ms": lambda of: number(of.traced_ms),
    }
    return Table.of(columns, results.breakdowns)


def all_reduce_table(results: Results) -> Table:
    """Times of all-reduces."""
    return Table.of(_ALL_REDUCES, (found for size in results.sizes for found in size.all_reduces))


def limits_table(results: Results) -> Table:
    """Measured limits of one device, in each size's process."""
    return Table.of(_LIMITS, (size for size in results.sizes if size.limits))


def csv_lines(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """Every row with its figures, under CSV_COLUMNS; None where there is no figure."""
    found: dict[tuple[str, int], Point] = {(point.scaling, id(point.row)): point for point in points(plan, results.rows)}
    breakdowns = {_key(breakdown): breakdown for breakdown in results.breakdowns}
    lines = []
    for row in results.rows:
        line = {name: getattr(row, name, None) for name in CSV_COLUMNS}
        line |= {f"{name}_ms": value for name, value in row.host_ms.items()}
        for scaling in (STRONG, WEAK):
            if point := found.get((scaling, id(row))):
                line |= {f"{scaling}_speed_up": point.speed_up, f"{scaling}_efficiency": point.efficiency}
                line |= {"weak_requests_per_device": point.num_requests} if scaling == WEAK else {}
        if breakdown := breakdowns.get(_key(row)):
            line |= {f"{part}_ms": value for part, value in breakdown.parts_ms.items()}
            line |= {name: getattr(breakdown, name) for name in HIDDEN}
        lines.append(line)
    return lines


def number(value: float | None) -> str:
    """Three digits or more: `1.43`, `0.0123`, `14.3`, `1 430`."""
    if value is None:
        return NOT_MEASURED
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 1 or size == 0:
        return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return f"{value:#.3g}" if size >= 1e-3 else f"{value:.1e}"


def share(value: float) -> str:
    """`67%`, `0.4%`"""
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def _key(of: Row | Breakdown) -> tuple[int, str, int]:
    """Which row a breakdown belongs to. Of a prefill only some prompts are traced."""
    return of.tensor_parallel_size, of.work, of.num_requests if of.work == DECODE else 0


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    rules = ["---" if name in TEXTS else "--:" for name in table.header]
    lines = [table.header, rules, *table.lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
