"""The charts of a scaling experiment as SVG text, by matplotlib (extra `plot`)."""

import importlib.util
import io
from typing import Any

from jaxllm.scaling.plan import DECODE, MIXED, PREFILL, STRONG, WEAK, WORKS
from jaxllm.scaling.results import PARTS, Results
from jaxllm.scaling.tables import figures, series

LINES = {
    "time_per_token": ("Decode: time per token, ms", STRONG, [DECODE], "ms_per_step"),
    "tokens_per_second": ("Decode: output tokens/s", STRONG, [DECODE], "tokens_per_second"),
    "throughput": ("Prefill and mixed work: tokens/s", STRONG, [PREFILL, MIXED], "tokens_per_second"),
    "speed_up": ("Strong scaling: speed-up", STRONG, WORKS, "strong_speed_up"),
    "efficiency": ("Strong scaling: efficiency", STRONG, WORKS, "strong_efficiency"),
    "tokens_per_second_per_device": ("Decode: tokens/s of each device", STRONG, [DECODE], "tokens_per_second_per_device"),
    "weak_time_per_token": ("Weak scaling by requests of each device: time per token, ms", WEAK, [DECODE], "ms_per_step"),
    "weak_efficiency": ("Weak scaling by requests of each device: efficiency", WEAK, [DECODE], "weak_efficiency"),
}
"""Title, kind of scaling, works and column of each chart of lines over the number of devices."""
BARS = {DECODE: "A decode step by devices, ms", PREFILL: "A step of prompts by devices, ms"}
"""Titles of the charts of the parts of a step, by work."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def charts(results: Results) -> dict[str, str]:
    """Every chart that has data, by name; none without matplotlib, as the tables hold the same figures."""
    if not can_draw():
        return {}
    from matplotlib.figure import Figure

    lines, drawn = figures(results), {}
    for name, (title, scaling, works, column) in LINES.items():
        groups = {key: group for key, group in series(results.plan, lines, scaling).items() if key[0] in works}
        if not groups:
            continue
        figure = Figure(layout="constrained")
        sizes = sorted({line["tensor_parallel_size"] for group in groups.values() for line in group})
        scale = "log" if "tokens" in column else "linear"
        axes = figure.add_subplot(title=title, xlabel="devices", xticks=sizes, yscale=scale)
        for (work, count), group in groups.items():
            heights = [line[column] for line in group]
            axes.plot([line["tensor_parallel_size"] for line in group], heights, "o-", label=f"{work} of {count}")
        if column == "strong_speed_up":
            axes.plot(sizes, [size / sizes[0] for size in sizes], "--", label="ideal")
        drawn[name] = _svg(figure)
    for work, title in BARS.items():
        of = [line for line in lines if line["work"] == work and "step_ms" in line]
        of = [line for line in of if work != DECODE or line["num_requests"] in results.plan.batch_sizes]
        if not of:
            continue
        of.sort(key=lambda line: (line["num_requests"], line["tensor_parallel_size"]))
        figure = Figure(layout="constrained")
        axes, places, bottom = figure.add_subplot(title=title), range(len(of)), [0.0] * len(of)
        for part in (*PARTS, "gaps"):
            heights = [line[f"{part}_ms"] or 0.0 for line in of]
            axes.bar(places, heights, bottom=bottom, label=part)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.plot(places, [line["launch_ms"] for line in of], "k_", label="launch on the host")
        axes.set_xticks(places, [f"{line['tensor_parallel_size']}\n{work} of {line['num_requests']}" for line in of])
        drawn[f"step_parts_{work}"] = _svg(figure)
    return drawn


def _svg(figure: Any) -> str:
    """The chart with a legend, as an element that fits into a page."""
    import matplotlib

    figure.legend(loc="outside right upper")
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxllm"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
