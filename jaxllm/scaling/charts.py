"""The charts of a scaling experiment as SVG text, by matplotlib (extra `plot`)."""

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from jaxllm.scaling.plan import DECODE, MIXED, PREFILL, STRONG, WEAK, WORKS
from jaxllm.scaling.results import CPU_THUNKS, Results
from jaxllm.scaling.tables import Line, figures, series

COLOURS = {"products": "#0072b2", "attention": "#56b4e9", "communication": "#d55e00", "other": "#009e73", "gaps": "#999999"}
"""Colours of the parts of a step, which colour-blind readers can distinguish (Okabe and Ito)."""
TIMES, SHARE, RATE, MS = "times as fast", "of the ideal", "tokens/s", "ms"
"""Units of charts."""
LINES = {
    "time_per_token": ("Decode: time per token", MS, STRONG, [DECODE], "ms_per_step"),
    "tokens_per_second": ("Decode: output tokens/s", RATE, STRONG, [DECODE], "tokens_per_second"),
    "throughput": ("Prefill and mixed work: tokens/s", RATE, STRONG, [PREFILL, MIXED], "tokens_per_second"),
    "speed_up": ("Strong scaling: speed-up", TIMES, STRONG, WORKS, "strong_speed_up"),
    "efficiency": ("Strong scaling: efficiency", SHARE, STRONG, WORKS, "strong_efficiency"),
    "tokens_per_second_per_device": ("Decode: tokens/s of each device", RATE, STRONG, [DECODE], "tokens_per_second_per_device"),
    "weak_time_per_token": ("Weak scaling: time per token", MS, WEAK, [DECODE], "ms_per_step"),
    "weak_efficiency": ("Weak scaling: efficiency", SHARE, WEAK, [DECODE], "weak_efficiency"),
}
"""Title, unit, kind of scaling, works and column of each chart of lines over the number of devices."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def charts(results: Results) -> dict[str, str]:
    """Every chart that has data, by name; none without matplotlib, as the tables hold the same figures."""
    if not can_draw():
        return {}
    lines, drawn = figures(results), {}
    for name, (title, unit, scaling, works, column) in LINES.items():
        found = series(results.plan, lines, scaling)
        suffix = " per device" * (scaling == WEAK)
        groups = {f"{work} of {count}{suffix}": group for (work, count), group in found.items() if work in works}
        if groups:
            drawn[name] = _lines(title, unit, groups, column)
    for work, title in ((DECODE, "A decode step, by devices"), (PREFILL, "A step of prompts, by devices")):
        of = [line for line in lines if line["work"] == work and "step_ms" in line]
        if of := [line for line in of if work != DECODE or line["num_requests"] in results.plan.batch_sizes]:
            # The profiler slows a CPU's thunks.
            on_cpu = any(found.source == CPU_THUNKS for found in results.breakdowns)
            drawn[f"step_parts_{work}"] = _bars(title + " (CPU, traced)" * on_cpu, of)
    return drawn


def _lines(title: str, unit: str, groups: dict[str, list[Line]], column: str) -> str:
    figure, axes = _figure(title, unit)
    for label, group in groups.items():
        axes.plot([line["tensor_parallel_size"] for line in group], [line[column] for line in group], marker="o", label=label)
    sizes = sorted({line["tensor_parallel_size"] for group in groups.values() for line in group})
    if unit in (TIMES, SHARE):
        axes.plot(sizes, [size / sizes[0] if unit == TIMES else 1 for size in sizes], "--", color="grey", label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)), minor=False)
    axes.set(xlabel="devices")
    if unit in (TIMES, RATE):
        axes.set_yscale("log", base=2 if unit == TIMES else 10)
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0%}" if unit == SHARE else "{x:g}")
    return _svg(figure)


def _bars(title: str, lines: Sequence[Line]) -> str:
    """The parts of a step stacked, for each batch size and number of devices, and the host's time of launching it."""
    figure, axes = _figure(title, "ms")
    lines = sorted(lines, key=lambda line: (line["num_requests"], line["tensor_parallel_size"]))
    places, bottom = range(len(lines)), [0.0] * len(lines)
    for part, colour in COLOURS.items():
        heights = [line[f"{part}_ms"] or 0.0 for line in lines]
        axes.bar(places, heights, bottom=bottom, color=colour, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.plot(places, [line["launch_ms"] for line in lines], "k_", markersize=22, label="launch on the host")
    axes.set_xticks(places, [f"{line['tensor_parallel_size']}\n{line['work']} of {line['num_requests']}" for line in lines])
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
