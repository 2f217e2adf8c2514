"""Writes an experiment's files: results.json, results.csv, report.md, report.html and the charts."""

import csv
import io
import os
import re
from html import escape
from pathlib import Path

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.files import read_json
from jaxllm.scaling.charts import can_draw, charts
from jaxllm.scaling.results import CPU_THUNKS, Results
from jaxllm.scaling.tables import ALL_REDUCES, CSV, LIMITS, MEASUREMENTS, STEP_PARTS, WEAK_SCALING, figures, tables

JSON_FILE, HTML_FILE, LOGS_FOLDER = "results.json", "report.html", "logs"
STYLE = """
:root { color-scheme: light dark; } h1, h2 { line-height: 1.2; } p, ul { max-width: 56rem; } svg { max-width: 100%; height: auto; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1.25rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .65rem; border-bottom: 1px solid #8884; white-space: nowrap; } pre { overflow-x: auto; font-size: 12.5px; }
"""
NO_CHARTS = "There are no charts, because matplotlib is missing: `pip install 'jaxllm[plot]'`."
ON_CPU = (
    "The devices are parts of one CPU and share its cores: these figures show that the experiment runs, not how a model scales. "
    "The limits are those of memory and of large products; a small model stays in the caches, and may be faster."
)
HEADINGS = {"weak": WEAK_SCALING, "step": STEP_PARTS}
"""Where charts stand whose names begin so; the others are of the measurements."""
ABOUT = {
    MEASUREMENTS: (
        "tok/s: of prefill prompt tokens, else output tokens. ms/step: of decode the time per token. Each figure is of the fastest run. "
        "Speed-up is the ratio of tok/s to that on the fewest devices; efficiency is speed-up over the ratio of devices. Of the limit: "
        "the time that the bytes and operations of each device take at its measured speed, without communication, over the measured "
        "time. Launch: host time of launching a step, which runs while the device computes."
    ),
    WEAK_SCALING: (
        "The number of requests grows with the devices. Each device reads as many keys and values at every size, but a smaller share of "
        "the weights, on which small batches spend most of their time: efficiencies far above 100 % are usual there."
    ),
    STEP_PARTS: (
        "Mean over the devices, from a profiler's trace. A moment in which several kernels run counts once: for products before "
        "attention, others and communication. Waiting: the part of communication in which a device waited for the last one. Gaps: the "
        "untraced time of a step less the time in which a kernel runs. Traced: a step under the profiler, which slows the host."
    ),
    CPU_THUNKS: (
        "On a CPU these are the operations that XLA ran under the profiler. Attention cannot be distinguished from others there; gaps "
        "and waiting are not measured."
    ),
    ALL_REDUCES: (
        "A sum of hidden states [rows, width] over all devices, measured alone: by XLA's own means (xla, NCCL on GPUs), and by kernels "
        "that access the memory of other GPUs (peer). Bus: bytes that a device sends by the ring algorithm. Per step: two per layer."
    ),
    LIMITS: "Measured by the process of each size. Read bytes: weights that a step reads, over all devices. Seconds: of the process.",
}


def make_directory(path: str) -> Path:
    """Create the directory if it is missing. Raises ConfigError if it holds results, which may have taken long."""
    directory = Path(path)
    if (directory / JSON_FILE).exists():
        raise ConfigError(f"{directory / JSON_FILE} exists already; give another --output, or move it away")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {directory}: {error.strerror}") from None
    return directory


def write(directory: Path, results: Results) -> None:
    """All files. Raises ConfigError if one cannot be written."""
    drawn = charts(results)
    markdown = as_markdown(results, drawn)
    texts = {
        JSON_FILE: msgspec.json.format(msgspec.json.encode(results), indent=1).decode() + "\n",
        "results.csv": as_csv(results),
        "report.md": markdown,
        HTML_FILE: as_html(markdown, drawn),
        **{f"plots/{name}.svg": svg for name, svg in drawn.items()},
    }
    try:
        for name, text in texts.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)  # a reader gets the old file or the new one
    except OSError as error:
        raise ConfigError(f"cannot write the results to {directory}: {error.strerror or error}") from None


def read(path: Path) -> Results:
    """An experiment from its results.json. Raises ConfigError."""
    try:
        return msgspec.convert(read_json(path), Results)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds no results of `jaxllm bench scaling`: {error}") from None


def as_csv(results: Results) -> str:
    """The figures of every row in full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(figures(results))
    return text.getvalue()


def as_html(markdown: str, drawn: dict[str, str]) -> str:
    """The report as one page that has its style and charts in it and loads nothing."""
    from markdown_it import MarkdownIt

    title = markdown.splitlines()[0].removeprefix("# ")
    body = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table").render(markdown)
    body = re.sub(r'<img src="\w+/(\w+)\.svg"[^>]*/>', lambda match: f'<span id="{match[1]}">{drawn[match[1]]}</span>', body)
    body = body.replace("<pre>", "<details><summary>details</summary><pre>").replace("</pre>", "</pre></details>")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}</body>\n</html>\n"
    )


def as_markdown(results: Results, drawn: dict[str, str]) -> str:
    """The report, with links to the charts that are `drawn`."""
    plan, engine = results.plan, next((size.engine for size in results.sizes if size.engine), {})
    parts = [
        f"# Tensor-parallel scaling of {Path(plan.model).name or plan.model} on {engine.get('device', 'no device')}",
        _points([f"{results.started_at} UTC", f"command: {results.command}", f"the fastest of {plan.repeats} runs each"]),
    ]
    if engine.get("platform") == "cpu":
        parts.append(ON_CPU)
    if results.rows and not can_draw():
        parts.append(NO_CHARTS)
    if results.problems:
        parts += ["## What is missing", _points(results.problems)]
    for heading, table in tables(results).items():
        if not table.lines:
            continue
        parts += [f"## {heading}", table.as_markdown(), ABOUT.get(heading, "")]
        if heading == STEP_PARTS and any(found.source == CPU_THUNKS for found in results.breakdowns):
            parts.append(ABOUT[CPU_THUNKS])
        parts += [f"![{name}](plots/{name}.svg)" for name in drawn if HEADINGS.get(name.split("_")[0], MEASUREMENTS) == heading]
    parts.append("## Environment")
    work = {name: value for name, value in msgspec.structs.asdict(plan).items() if name != "options"}
    named = {"Work": work, "Versions, devices and variables": results.environment, "Kernels": engine.get("kernels", {})}
    for name, values in (named | {"Engine options": engine.get("options", plan.options)}).items():
        parts += [f"{name}:", "\n".join(["```", *(f"{key}: {value}" for key, value in values.items()), "```"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _points(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
