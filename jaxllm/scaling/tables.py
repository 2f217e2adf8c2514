"""The figures of the rows, among them speed-up and efficiency, and the tables that show them.

Strong scaling compares the same work on more devices; weak scaling the same work for each device: decodes of b·n requests on n
devices. Speed-up is the ratio of tokens per second to those on the fewest devices, and efficiency is speed-up over the ratio of
devices. A line of a table is a dict; names of columns are those of results.csv.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxllm.scaling.plan import DECODE, SCALINGS, STRONG, WEAK, Plan
from jaxllm.scaling.results import PARTS, AllReduce, Breakdown, Results, Row

Line = dict[str, Any]

MEASUREMENTS, WEAK_SCALING, STEP_PARTS = "Measurements", "Weak scaling", "Where the time of a step goes"
ALL_REDUCES, LIMITS, KERNELS = "All-reduces", "Limits of one device", "The longest kernels"

_PARTS_MS = tuple(f"{part}_ms" for part in PARTS)
CSV = (
    *("tensor_parallel_size", "work", "num_requests", "num_prompt_tokens", "num_tokens", "num_steps", "seconds", "ms_per_step"),
    *("tokens_per_second", "tokens_per_second_per_device", "strong_speed_up", "strong_efficiency", "weak_requests_per_device"),
    *("weak_speed_up", "weak_efficiency", "least_seconds", "share_of_limit", "mean_context", "dispatch_ms", "launch_ms"),
    *("wait_ms", *_PARTS_MS, "hidden_communication_ms", "waiting_ms", "gaps_ms", "note"),
)
_ROW = ("tensor_parallel_size", "work", "num_requests")
_SPEED = (*_ROW, "ms_per_step", "tokens_per_second", "tokens_per_second_per_device")
_MAIN = (*_SPEED, "strong_speed_up", "strong_efficiency", "share_of_limit", "launch_ms", "note")
_WEAK = ("weak_requests_per_device", *_SPEED, "weak_speed_up", "weak_efficiency", "share_of_limit", "note")
_STEP_PARTS = (*_ROW, "step_ms", *_PARTS_MS, "waiting_ms", "gaps_ms", "kernels", "launch_ms", "traced_ms")
_KERNELS = (*_ROW, "part", "step_ms", "launches", "kernel")
_ALL_REDUCES = (
    *("tensor_parallel_size", "implementation", "rows", "width", "num_bytes", "microseconds", "bus_bytes_per_second"),
    *("per_step", "step_ms"),
)
_LIMITS = (
    *("tensor_parallel_size", "copy_bytes_per_second", "gemm_flops_per_second", "gemm_dtype", "read_bytes_per_step"),
    *("cache_bytes_per_token", "start_seconds", "seconds", "jax"),
)
_HEADERS = {
    "tensor_parallel_size": "devices",
    "num_requests": "requests",
    "ms_per_step": "ms/step",
    "tokens_per_second": "tok/s",
    "tokens_per_second_per_device": "tok/s/device",
    "share_of_limit": "of the limit",
}
"""Short names of columns; the others have their own."""


class Table(NamedTuple):
    """Columns by name, and what they hold in each line."""

    columns: Sequence[str]
    lines: list[Line]

    def as_text(self, *, with_header: bool = True) -> str:
        """For a terminal, with columns that do not depend on the lines."""
        headers = list(map(_header, self.columns))
        table = [headers] * with_header + self.cells()
        return "\n".join(
            "  ".join(cell.rjust(max(9, len(header))) for cell, header in zip(line, headers, strict=True)).rstrip()
            for line in table
        )

    def as_markdown(self) -> str:
        table = [list(map(_header, self.columns)), ["--:"] * len(self.columns), *self.cells()]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table)

    def cells(self) -> list[list[str]]:
        return [[_cell(column, line.get(column)) for column in self.columns] for line in self.lines]


def figures(results: Results) -> list[Line]:
    """The figures of each row, under the names of CSV, and of a row with a breakdown those of its table."""
    breakdowns = {_key(breakdown): breakdown for breakdown in results.breakdowns}
    lines = []
    for row in results.rows:
        seconds = min(row.run_seconds)
        line: Line = dict.fromkeys(CSV) | msgspec.structs.asdict(row) | {f"{name}_ms": ms for name, ms in row.host_ms.items()}
        line |= {
            "seconds": seconds,
            "ms_per_step": seconds / row.num_steps * 1e3,
            "share_of_limit": row.least_seconds / seconds,
        }
        line["tokens_per_second"] = row.num_tokens / seconds
        line["tokens_per_second_per_device"] = row.num_tokens / seconds / row.tensor_parallel_size
        if breakdown := breakdowns.get(_key(row)):
            line |= {f"{part}_ms": ms for part, ms in breakdown.parts_ms.items()}
            others = ("hidden_communication_ms", "waiting_ms", "gaps_ms", "step_ms", "traced_ms")
            line |= {name: getattr(breakdown, name) for name in others} | {"kernels": round(breakdown.launches)}
        lines.append(line)
    for scaling in SCALINGS:
        for (_, count), group in series(results.plan, lines, scaling).items():
            for line in group:
                speed_up = line["tokens_per_second"] / group[0]["tokens_per_second"]
                ideal = line["tensor_parallel_size"] / group[0]["tensor_parallel_size"]
                line |= {f"{scaling}_speed_up": speed_up, f"{scaling}_efficiency": speed_up / ideal}
                line |= {"weak_requests_per_device": count} if scaling == WEAK else {}
    return lines


def series(plan: Plan, lines: Iterable[Line], scaling: str) -> dict[tuple[str, int], list[Line]]:
    """The figures that a kind of scaling compares, from the fewest to the most devices, by work and number of requests (weak: for
    each device). Empty if the plan does not ask for it."""
    found: dict[tuple[str, int], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["tensor_parallel_size"]) if scaling in plan.scalings else []:
        count, rest = divmod(line["num_requests"], line["tensor_parallel_size"] if scaling == WEAK else 1)
        # Some decodes are measured for one kind of scaling alone.
        if (rest == 0 and count in plan.batch_sizes) if line["work"] == DECODE else scaling == STRONG:
            found.setdefault((line["work"], count), []).append(line)
    return found


def tables(results: Results) -> dict[str, Table]:
    """All tables by their headings. Some may have no lines."""
    lines = figures(results)
    weak = [line for line in lines if line["weak_requests_per_device"]]
    return {
        MEASUREMENTS: Table(_MAIN, lines),
        WEAK_SCALING: Table(_WEAK, sorted(weak, key=lambda line: (line["weak_requests_per_device"], line["num_requests"]))),
        STEP_PARTS: Table(_STEP_PARTS, [line for line in lines if "step_ms" in line]),
        ALL_REDUCES: Table(_ALL_REDUCES, [_all_reduce(of) for size in results.sizes for of in size.all_reduces]),
        LIMITS: Table(
            _LIMITS, [size.engine | size.limits | msgspec.structs.asdict(size) for size in results.sizes if size.limits]
        ),
        KERNELS: Table(
            _KERNELS,
            [
                msgspec.structs.asdict(of) | {"kernel": f"`{name[:90]}`", "part": part, "step_ms": ms, "launches": count}
                for of in results.breakdowns
                for name, part, ms, count in of.top
            ],
        ),
    }


def _all_reduce(of: AllReduce) -> Line:
    """Each device sends and receives by the algorithm of a ring."""
    num_bytes = of.num_bytes * 2 * (of.tensor_parallel_size - 1) / of.tensor_parallel_size
    times = {"microseconds": of.seconds * 1e6, "step_ms": of.seconds * of.per_step * 1e3}
    return msgspec.structs.asdict(of) | times | {"bus_bytes_per_second": num_bytes / of.seconds}


def _header(column: str) -> str:
    name = _HEADERS.get(column) or column.removeprefix("strong_").removeprefix("weak_")
    return name.replace("speed_up", "speed-up").replace("_", " ")


def _cell(column: str, value: Any) -> str:
    if value is not None and (column == "share_of_limit" or column.endswith("efficiency")):
        return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"
    return "" if value is None and column == "note" else number(value)


def number(value: float | str | None) -> str:
    """Three digits or more of a fraction: `1.43`, `0.0123`, `14.3`, `1 430`, `4.91e+12`. Text as it is."""
    if value is None or isinstance(value, str):
        return value or "–"
    size = abs(value)
    if isinstance(value, int) or 1000 <= size < 1e8:
        return f"{value:,.0f}".replace(",", " ")
    if 1 <= size < 1000 or size == 0:
        return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return f"{value:#.3g}"


def _key(of: Row | Breakdown) -> tuple[int, str, int]:
    """Which row a breakdown belongs to. Of a prefill only some prompts are traced."""
    return of.tensor_parallel_size, of.work, of.num_requests if of.work == DECODE else 0
