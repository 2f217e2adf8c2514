"""The charts of a scaling experiment as SVG text, by matplotlib (extra `plot`)."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.scaling.figures import Point, points
from jaxllm.scaling.plan import STRONG, WEAK, Plan
from jaxllm.scaling.rows import CPU_THUNKS, DECODE, PREFILL, Breakdown, Results

COLOURS = {
    "products": "#0072b2",
    "attention": "#56b4e9",
    "communication": "#d55e00",
    "other": "#009e73",
    "no kernel": "#999999",
}
"""Colours of the parts of a step that colour-blind readers can distinguish them (Okabe and Ito)."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def charts(plan: Plan, results: Results) -> dict[str, str]:
    """Every chart that has data, by name; none without matplotlib, as the tables hold the same figures."""
    if not can_draw():
        return {}
    found = points(plan, results.rows)
    strong, weak = ([point for point in found if point.scaling == scaling] for scaling in (STRONG, WEAK))
    decodes = [point for point in strong if point.row.work == DECODE]
    others = [point for point in strong if point.row.work != DECODE]
    ms, rate, of_each = "ms_per_step", "tokens_per_second", "tokens_per_second_per_device"

    def of_row(name: str) -> Callable[[Point], float]:
        return lambda point: getattr(point.row, name)

    def percent(point: Point) -> float:
        return point.efficiency * 100

    lines: dict[str, tuple[str, str, Sequence[Point], Callable[[Point], float], Mapping[str, Any]]] = {
        "time_per_token": ("Decode: time per token", "ms", decodes, of_row(ms), {}),
        "tokens_per_second": ("Output tokens/s of decode", "tokens/s", decodes, of_row(rate), {"log": 10}),
        "throughput": ("Prefill and mixed work: tokens/s", "tokens/s", others, of_row(rate), {"log": 10}),
        "speed_up": (
            *("Strong scaling: speed-up", "times as fast", strong, lambda point: point.speed_up),
            {"log": 2, "ideal": lambda ratio: ratio},
        ),
        "efficiency": ("Strong scaling: efficiency", "%", strong, percent, {"ideal": lambda ratio: 100}),
        of_each: ("Strong scaling: tokens/s of each device", "tokens/s", decodes, of_row(of_each), {"log": 10}),
        "weak_time_per_token": ("Weak scaling: time per token", "ms", weak, of_row(ms), {}),
        "weak_efficiency": ("Weak scaling: efficiency", "%", weak, percent, {"ideal": lambda ratio: 100}),
    }
    drawn = {name: _lines(title, unit, of, value, **how) for name, (title, unit, of, value, how) in lines.items() if of}
    launches = {
        (row.tensor_parallel_size, row.num_requests): row.host_ms.get("launch") for row in results.rows if row.work == DECODE
    }
    for work, title in ((DECODE, "A decode step, by devices"), (PREFILL, "A step of prompts, by devices")):
        of = [found for found in results.breakdowns if found.work == work]
        if of := [found for found in of if work != DECODE or found.num_requests in plan.batch_sizes]:
            drawn[f"step_parts_{work}"] = _bars(title, of, launches if work == DECODE else {})
    return drawn


def _lines(
    title: str, unit: str, found: Sequence[Point], value: Callable[[Point], float], *, log: int = 0, ideal: Any = None
) -> str:
    """A line for each piece of work over the number of devices. `ideal`: of the ratio of devices to the fewest."""
    figure, axes = _figure(title, unit)
    works: dict[str, list[Point]] = {}
    for point in found:
        name = f"{point.num_requests} per device" if point.scaling == WEAK else f"batch {point.num_requests}"
        works.setdefault(name if point.row.work == DECODE else point.row.work, []).append(point)
    for name, line in works.items():
        axes.plot([point.row.tensor_parallel_size for point in line], list(map(value, line)), marker="o", label=name)
    sizes = sorted({point.row.tensor_parallel_size for point in found})
    if ideal is not None:
        axes.plot(sizes, [ideal(size / sizes[0]) for size in sizes], "--", color="grey", label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)), minor=False)
    axes.set(xlabel="devices")
    if log and min(map(value, found)) > 0:
        axes.set_yscale("log", base=log)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    return _svg(figure)


def _bars(title: str, found: Sequence[Breakdown], launches: Mapping[tuple[int, int], float | None]) -> str:
    """The parts of a step stacked, for each batch size and number of devices, and the host's time of launching it."""
    if any(each.source == CPU_THUNKS for each in found):
        title += " (CPU, traced)"  # the profiler slows what is drawn
    figure, axes = _figure(title, "ms")
    found = sorted(found, key=lambda each: (each.num_requests, each.tensor_parallel_size))
    places = range(len(found))
    bottom = [0.0] * len(found)
    for part, colour in COLOURS.items():
        heights = [(each.gaps_ms if part == "no kernel" else each.parts_ms[part]) or 0.0 for each in found]
        axes.bar(places, heights, bottom=bottom, color=colour, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    marks = [(place, launches.get((of.tensor_parallel_size, of.num_requests))) for place, of in zip(places, found, strict=True)]
    if known := [(place, ms) for place, ms in marks if ms is not None]:
        axes.plot(*zip(*known, strict=True), "k_", markersize=22, label="launch on the host")
    names = [
        f"{each.tensor_parallel_size}\nbatch {each.num_requests}" if launches else each.tensor_parallel_size for each in found
    ]
    axes.set_xticks(places, names)
    return _svg(figure)


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, ylabel=unit)
    axes.grid(alpha=0.3)
    return figure, axes


def _svg(figure: Any) -> str:
    """The chart with a legend, as an element that fits into a page."""
    import matplotlib

    figure.legend(loc="outside right upper")
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxllm"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
