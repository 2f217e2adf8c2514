"""The tables of a scaling experiment: the same cells for the terminal, report.md, report.html and results.csv."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.scaling.figures import Point, points
from jaxllm.scaling.plan import STRONG, WEAK, Plan
from jaxllm.scaling.rows import DECODE, MIXED, PARTS, PREFILL, Breakdown, Results, Row

NOT_MEASURED = "–"
UNITS = {DECODE: "ms/token", PREFILL: "prompt tok/s", MIXED: "output tok/s"}
ROW_HEADER = (
    *("devices", "work", "requests", "result", "unit", "tok/s", "tok/s/device", "speed-up", "efficiency", "of the limit"),
    *("launch ms", "note"),
)
WEAK_HEADER = (
    "requests per device",
    "devices",
    "requests",
    "ms/token",
    "tok/s",
    "tok/s/device",
    "speed-up",
    "efficiency",
    "of the limit",
)
PARTS_HEADER = (
    *("devices", "work", "requests", "step ms", "products", "attention", "communication", "waiting", "other", "gaps"),
    *("kernels", "launch ms", "traced ms"),
)
ALL_REDUCE_HEADER = ("devices", "by", "rows", "width", "bytes", "µs", "bus GB/s", "per step", "ms per step")
LIMITS_HEADER = ("devices", "copy TB/s", "product TFLOP/s", "type", "weights read per step GB", "cache kB/token", "start s")
CSV_COLUMNS = (
    *("tensor_parallel_size", "work", "num_requests", "num_prompt_tokens", "num_tokens", "num_steps", "seconds", "ms_per_step"),
    *("tokens_per_second", "tokens_per_second_per_device", "strong_speed_up", "strong_efficiency", "weak_requests_per_device"),
    *("weak_speed_up", "weak_efficiency", "least_seconds", "share_of_limit", "mean_context", "dispatch_ms", "launch_ms"),
    *("wait_ms", *(f"{part}_ms" for part in PARTS), "hidden_communication_ms", "waiting_ms", "gaps_ms", "note"),
)


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    header: tuple[str, ...]
    lines: list[list[str]]


def row_cells(row: Row, point: Point | None) -> list[str]:
    """A line of the main table. `point`: its place in strong scaling, if it has one."""
    return [
        str(row.tensor_parallel_size),
        row.work,
        str(row.num_requests),
        number(row.ms_per_step if row.work == DECODE else row.tokens_per_second),
        UNITS[row.work],
        number(row.tokens_per_second),
        number(row.tokens_per_second_per_device),
        NOT_MEASURED if point is None else f"{point.speed_up:.2f}",
        NOT_MEASURED if point is None else f"{point.efficiency:.0%}",
        share(row.share_of_limit),
        number(row.host_ms.get("launch")),
        row.note or "",
    ]


def main_table(plan: Plan, rows: Sequence[Row]) -> Table:
    """Every row, by size and work."""
    strong = {id(point.row): point for point in points(plan, rows) if point.scaling == STRONG}
    return Table(ROW_HEADER, [row_cells(row, strong.get(id(row))) for row in rows])


def weak_table(plan: Plan, rows: Sequence[Row]) -> Table:
    """Decodes with the same number of requests for each device."""
    weak = [point for point in points(plan, rows) if point.scaling == WEAK]
    weak.sort(key=lambda point: (point.num_requests, point.row.tensor_parallel_size))
    lines = [
        [
            str(point.num_requests),
            str(point.row.tensor_parallel_size),
            str(point.row.num_requests),
            number(point.row.ms_per_step),
            number(point.row.tokens_per_second),
            number(point.row.tokens_per_second_per_device),
            f"{point.speed_up:.2f}",
            f"{point.efficiency:.0%}",
            share(point.row.share_of_limit),
        ]
        for point in weak
    ]
    return Table(WEAK_HEADER, lines)


def parts_table(results: Results) -> Table:
    """Milliseconds of a step by what runs in them."""
    launches = {_key(row): row.host_ms.get("launch") for row in results.rows}
    lines = [
        [
            str(found.tensor_parallel_size),
            found.work,
            str(found.num_requests),
            number(found.step_ms),
            number(found.parts_ms["products"]),
            number(found.parts_ms["attention"]),
            number(found.parts_ms["communication"]),
            number(found.waiting_ms),
            number(found.parts_ms["other"]),
            number(found.gaps_ms),
            f"{found.launches:.0f}",
            number(launches.get(_key(found))),
            number(found.traced_ms),
        ]
        for found in results.breakdowns
    ]
    return Table(PARTS_HEADER, lines)


def all_reduce_table(results: Results) -> Table:
    """Times of all-reduces."""
    lines = [
        [
            str(found.tensor_parallel_size),
            found.implementation,
            str(found.rows),
            str(found.width),
            f"{found.num_bytes:,}".replace(",", " "),
            number(found.seconds * 1e6),
            number(found.bus_bytes_per_second / 1e9),
            str(found.per_step),
            number(found.seconds * found.per_step * 1e3),
        ]
        for size in results.sizes
        for found in size.all_reduces
    ]
    return Table(ALL_REDUCE_HEADER, lines)


def limits_table(results: Results) -> Table:
    """Measured limits of one device, in each size's process."""
    lines = [
        [
            str(size.tensor_parallel_size),
            number(size.limits["copy_bytes_per_second"] / 1e12),
            number(size.limits["gemm_flops_per_second"] / 1e12),
            str(size.limits["gemm_dtype"]),
            number(size.engine["read_bytes_per_step"] / 1e9) if size.engine else NOT_MEASURED,
            number(size.engine["cache_bytes_per_token"] / 1e3) if size.engine else NOT_MEASURED,
            number(size.engine["start_seconds"]) if size.engine else NOT_MEASURED,
        ]
        for size in results.sizes
        if size.limits
    ]
    return Table(LIMITS_HEADER, lines)


def csv_lines(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """Every row with its figures, under CSV_COLUMNS; what there is not is None."""
    found = points(plan, results.rows)
    strong = {id(point.row): point for point in found if point.scaling == STRONG}
    weak = {id(point.row): point for point in found if point.scaling == WEAK}
    parts = {_key(breakdown): breakdown for breakdown in results.breakdowns}
    lines = []
    for row in results.rows:
        line: dict[str, Any] = dict.fromkeys(CSV_COLUMNS)
        for name in CSV_COLUMNS:
            if hasattr(row, name):
                line[name] = getattr(row, name)
        line |= {f"{name}_ms": value for name, value in row.host_ms.items()}
        if (point := strong.get(id(row))) is not None:
            line |= {"strong_speed_up": point.speed_up, "strong_efficiency": point.efficiency}
        if (point := weak.get(id(row))) is not None:
            line |= {"weak_requests_per_device": point.num_requests, "weak_speed_up": point.speed_up}
            line["weak_efficiency"] = point.efficiency
        if (breakdown := parts.get(_key(row))) is not None:
            line |= {f"{part}_ms": value for part, value in breakdown.parts_ms.items()}
            for name in ("hidden_communication_ms", "waiting_ms", "gaps_ms"):
                line[name] = getattr(breakdown, name)
        lines.append(line)
    return lines


def number(value: float | None) -> str:
    """Three digits or more: `1.43`, `0.0123`, `14.3`, `1 430`."""
    if value is None:
        return NOT_MEASURED
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}"
    return f"{value:#.3g}" if size >= 1e-3 else f"{value:.1e}"


def share(value: float) -> str:
    """`67%`, `0.4%`"""
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def _key(of: Row | Breakdown) -> tuple[int, str, int]:
    """Which row a breakdown belongs to. Of a prefill only some prompts are traced."""
    return of.tensor_parallel_size, of.work, of.num_requests if of.work == DECODE else 0


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    lines = [table.header, tuple("---" for _ in table.header), *table.lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def limits(of: Mapping[str, Any]) -> str:
    """`copy 3.9 TB/s, bfloat16 product 680 TFLOP/s`"""
    copy, product = number(of["copy_bytes_per_second"] / 1e12), number(of["gemm_flops_per_second"] / 1e12)
    return f"copy {copy} TB/s, {of['gemm_dtype']} product {product} TFLOP/s"
