"""The charts of a scaling experiment."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxllm.scaling.charts import Bar, Series, line_chart, stacked_bars
from jaxllm.scaling.figures import Point, points
from jaxllm.scaling.plan import STRONG, WEAK, Plan
from jaxllm.scaling.rows import CPU_THUNKS, DECODE, PREFILL, Breakdown, Results, Row

DEVICES = "devices"
LAUNCH = "launch on the host"
_PART_NAMES = {"products": "products", "attention": "attention", "communication": "communication", "other": "other kernels"}
_GAPS = "no kernel runs"
_PART_COLOURS = {
    "products": "#0072b2",
    "attention": "#56b4e9",
    "communication": "#d55e00",
    "other kernels": "#009e73",
    _GAPS: "#999999",
}


@dataclass(frozen=True)
class Plot:
    """A chart, with the name of its file."""

    name: str
    svg: str


def plots(plan: Plan, results: Results) -> list[Plot]:
    """Every chart that has data."""
    found = points(plan, results.rows)
    strong = [point for point in found if point.scaling == STRONG]
    weak = [point for point in found if point.scaling == WEAK]
    decodes = [point for point in strong if point.row.work == DECODE]
    drawn: list[Plot | None] = [
        _lines("time_per_token", "Decode: time per token", "ms", decodes, lambda point: point.row.ms_per_step),
        _lines("tokens_per_second", "Output tokens/s of decode", "tokens/s", decodes, _rate, log_base=10),
        _lines("throughput", "Prefill and mixed work: tokens/s", "tokens/s", _others(strong), _rate, log_base=10),
        _lines("speed_up", "Strong scaling: speed-up", "times as fast", strong, _speed_up, log_base=2, ideal=True),
        _lines("efficiency", "Strong scaling: efficiency", "%", strong, _percent, ideal_value=100.0),
        _lines(
            "tokens_per_second_per_device",
            "Strong scaling: tokens/s of each device",
            "tokens/s",
            decodes,
            lambda point: point.row.tokens_per_second_per_device,
            log_base=10,
        ),
        _lines("weak_time_per_token", "Weak scaling: time per token", "ms", weak, lambda point: point.row.ms_per_step),
        _lines("weak_efficiency", "Weak scaling: efficiency", "%", weak, _percent, ideal_value=100.0),
        *_bars(plan, results),
    ]
    return [plot for plot in drawn if plot is not None]


def _rate(point: Point) -> float:
    return point.row.tokens_per_second


def _speed_up(point: Point) -> float:
    return point.speed_up


def _percent(point: Point) -> float:
    return point.efficiency * 100


def _others(found: Sequence[Point]) -> list[Point]:
    return [point for point in found if point.row.work != DECODE]


def _lines(
    name: str,
    title: str,
    y_label: str,
    found: Sequence[Point],
    value: Callable[[Point], float],
    *,
    log_base: int | None = None,
    ideal: bool = False,
    ideal_value: float | None = None,
) -> Plot | None:
    """A line for each piece of work; `ideal`: the line on which a device more is worth a device."""
    if not found:
        return None
    names = list(dict.fromkeys(_name(point) for point in found))
    series = [
        Series(each, [(point.row.tensor_parallel_size, value(point)) for point in found if _name(point) == each])
        for each in names
    ]
    sizes = sorted({point.row.tensor_parallel_size for point in found})
    if ideal:
        series.append(Series("ideal", [(size, size / sizes[0]) for size in sizes], ideal=True))
    if ideal_value is not None:
        series.append(Series("ideal", [(size, ideal_value) for size in sizes], ideal=True))
    return Plot(name, line_chart(title, DEVICES, y_label, series, log_base=log_base))


def _name(point: Point) -> str:
    if point.row.work != DECODE:
        return point.row.work
    return f"{point.num_requests} per device" if point.scaling == WEAK else f"batch {point.num_requests}"


def _bars(plan: Plan, results: Results) -> list[Plot]:
    """Where the time of a step goes: one chart for decode, one for prefill."""
    decodes = [found for found in results.breakdowns if found.work == DECODE and found.num_requests in plan.batch_sizes]
    prefills = [found for found in results.breakdowns if found.work == PREFILL]
    launches = {(row.tensor_parallel_size, row.work, row.num_requests): row for row in results.rows}
    drawn = []
    if decodes:
        batches = sorted({found.num_requests for found in decodes})
        groups = [(f"batch {batch}", _stacks((b for b in decodes if b.num_requests == batch), launches)) for batch in batches]
        title = "A decode step, by devices" + _traced(decodes)
        drawn.append(Plot("step_parts_decode", stacked_bars(title, "ms", groups, colour=_PART_COLOURS, mark_name=LAUNCH)))
    if prefills:
        groups = [("prefill", _stacks(prefills, {}))]
        title = "A step of prompts, by devices" + _traced(prefills)
        drawn.append(Plot("step_parts_prefill", stacked_bars(title, "ms", groups, colour=_PART_COLOURS)))
    return drawn


def _traced(found: Sequence[Breakdown]) -> str:
    """On a CPU the profiler slows what is drawn."""
    return " (CPU, traced)" if any(each.source == CPU_THUNKS for each in found) else ""


def _stacks(found: Iterable[Breakdown], rows: dict[tuple[int, str, int], Row]) -> list[Bar]:
    bars = []
    for breakdown in sorted(found, key=lambda breakdown: breakdown.tensor_parallel_size):
        parts = [(_PART_NAMES[name], value) for name, value in breakdown.parts_ms.items() if value is not None]
        if breakdown.gaps_ms is not None:
            parts.append((_GAPS, breakdown.gaps_ms))
        row = rows.get((breakdown.tensor_parallel_size, breakdown.work, breakdown.num_requests))
        mark = row.host_ms.get("launch") if row is not None else None
        bars.append(Bar(str(breakdown.tensor_parallel_size), parts, mark))
    return bars
