"""Writes an experiment's files: results.json, results.csv, report.md, report.html and the charts."""

import csv
import io
import json
import os
import re
from html import escape
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.files import read_json
from jaxllm.scaling import tables
from jaxllm.scaling.charts import can_draw, charts
from jaxllm.scaling.figures import Point, points
from jaxllm.scaling.plan import STRONG, Plan
from jaxllm.scaling.rows import CPU_THUNKS, DECODE, MIXED, PREFILL, Results, from_json, to_json

JSON_FILE, CSV_FILE, MARKDOWN_FILE, HTML_FILE = "results.json", "results.csv", "report.md", "report.html"
LOGS_FOLDER, PLOTS_FOLDER = "logs", "plots"
STYLE = """
:root { color-scheme: light dark; } h1, h2 { line-height: 1.2; } p, ul { max-width: 56rem; } svg { max-width: 100%; height: auto; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1.25rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .65rem; border-bottom: 1px solid #8884; white-space: nowrap; } pre { overflow-x: auto; font-size: 12.5px; }
"""
NO_CHARTS = "There are no charts, because matplotlib is missing: `pip install 'jaxllm[plot]'`."
ABOUT_ROWS = (
    "Decode: milliseconds per token of each request, in steps that decode all requests and nothing else. Prefill: prompt tokens per "
    "second. Mixed: output tokens per second of requests of differing lengths, all given at once. Each figure is of the fastest run; "
    "results.json has all of them. Speed-up is the ratio of tokens per second to those on the fewest devices; efficiency is speed-up "
    "over the ratio of devices. Of the limit: the time that the bytes and operations of each device take at its measured speed, over "
    "the measured time; communication is not in the limit. Launch: host time of launching a step, which runs while the device computes."
)
ABOUT_WEAK = (
    "The number of requests grows with the devices. Each device reads as many keys and values at every size, but a smaller share of the "
    "weights, on which small batches spend most of their time: an efficiency far above 100 % is usual there. The share of the limit "
    "takes that into account."
)
ABOUT_PARTS = (
    "Milliseconds per step, mean over the devices, from a profiler's trace. A moment in which several kernels run counts once: for "
    "products before attention, others and communication. Waiting is the part of communication in which a device waited for the last "
    "one. Gaps: the untraced time of a step less the time in which a kernel runs. Traced: a step's time under the profiler, which "
    "slows the host."
)
ABOUT_THUNKS = (
    "On a CPU these are the operations that XLA ran under the profiler, by their names. Attention cannot be distinguished from others "
    "there; gaps and waiting are not measured."
)
ABOUT_ALL_REDUCES = (
    "A sum of hidden states [rows, width] over all devices, measured alone: by XLA's own means (xla, NCCL on GPUs), and by kernels that "
    "access the memory of other GPUs (peer). Bus: bytes that a device sends by the ring algorithm, per second. Per step: two per layer."
)
ABOUT_CPU = (
    "The devices are parts of one CPU and share its cores: these figures show that the experiment runs, not how a model scales. "
    "The limits are those of memory and of large products; a small model stays in the caches, and may be faster."
)


def write(directory: Path, plan: Plan, results: Results) -> None:
    """All files. Raises ConfigError if one cannot be written."""
    drawn = charts(plan, results)
    title, markdown = document(plan, results, drawn)
    texts = {
        JSON_FILE: json.dumps(to_json(results), indent=1, ensure_ascii=False) + "\n",
        CSV_FILE: as_csv(plan, results),
        MARKDOWN_FILE: markdown,
        HTML_FILE: as_html(title, markdown, drawn),
        **{f"{PLOTS_FOLDER}/{name}.svg": svg for name, svg in drawn.items()},
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


def read(path: Path) -> tuple[Plan, Results]:
    """An experiment from its results.json. Raises ConfigError."""
    content = read_json(path)
    try:
        results = from_json(Results, content)
        return Plan.from_json(results.plan), results
    except ConfigError as error:
        raise ConfigError(f"{path} holds no results of `jaxllm bench scaling`: {error}") from None


def as_csv(plan: Plan, results: Results) -> str:
    """Every row with its figures."""
    text = io.StringIO()
    writer = csv.DictWriter(text, tables.CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(tables.csv_lines(plan, results))
    return text.getvalue()


def as_html(title: str, markdown: str, drawn: dict[str, str]) -> str:
    """The report as one page that has its style and charts in it and loads nothing."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table").render(markdown)
    body = re.sub(r'<img src="\w+/(\w+)\.svg"[^>]*/>', lambda match: f'<span id="{match[1]}">{drawn[match[1]]}</span>', body)
    body = body.replace("<pre>", "<details><summary>details</summary><pre>").replace("</pre>", "</pre></details>")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}</body>\n</html>\n"
    )


def document(plan: Plan, results: Results, drawn: dict[str, str]) -> tuple[str, str]:
    """The report's title, and its text in Markdown."""
    engines = [size.engine for size in results.sizes if size.engine]
    title = f"Tensor-parallel scaling of {Path(plan.model).name or plan.model} on {engines[0]['device'] if engines else 'no device'}"
    parts = [f"# {title}", _points(_about(plan, results))]

    def add(heading: str, table: tables.Table, text: str = "", *names: str) -> None:
        """A section, if its table has lines."""
        if table.lines:
            shown = "\n".join(f"![{name}]({PLOTS_FOLDER}/{name}.svg)" for name in names if name in drawn)
            parts.extend(filter(None, [f"## {heading}", tables.as_markdown(table), text, shown]))

    if engines and engines[0]["platform"] == "cpu":
        parts.append(ABOUT_CPU)
    if results.rows and not can_draw():
        parts.append(NO_CHARTS)
    for heading, lines in (("In short", in_short(plan, results)), ("What is missing", _problems(results))):
        if lines:
            parts += [f"## {heading}", _points(lines)]
    rates = ("tokens_per_second", "tokens_per_second_per_device", "throughput", "speed_up", "efficiency")
    add("Measurements", tables.main_table(plan, results.rows), ABOUT_ROWS, "time_per_token", *rates)
    add("Weak scaling", tables.weak_table(plan, results.rows), ABOUT_WEAK, "weak_time_per_token", "weak_efficiency")
    about_parts = ABOUT_PARTS
    if any(found.source == CPU_THUNKS for found in results.breakdowns):
        about_parts += f"\n\n{ABOUT_THUNKS}"
    names = ("step_parts_decode", "step_parts_prefill")
    add("Where the time of a step goes", tables.parts_table(results), about_parts, *names)
    if results.breakdowns:
        parts += ["The longest kernels:", _fenced(_longest(results))]
    add("All-reduces", tables.all_reduce_table(results), ABOUT_ALL_REDUCES)
    add("Limits of one device, measured", tables.limits_table(results))
    named = {"Versions, devices and variables": results.environment}
    named["Engine options"] = engines[-1]["options"] if engines else plan.options
    parts.append("## Environment")
    for name, values in named.items():
        parts += [f"{name}:", _fenced([f"{key}: {value}" for key, value in values.items()])]
    return title, "\n\n".join(parts) + "\n"


def _points(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _fenced(lines: list[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def in_short(plan: Plan, results: Results) -> list[str]:
    """One sentence for each piece of work that was measured on several sizes."""
    last: dict[tuple[str, str, int], Point] = {}
    for point in points(plan, results.rows):
        if point.ideal > 1:
            last[point.scaling, point.row.work, point.num_requests] = point
    return [_sentence(point) for point in last.values()]


def _sentence(point: Point) -> str:
    base, row = point.base, point.row
    work, faster = row.work, "times as fast"
    figures = [tables.number(each.tokens_per_second if work != DECODE else each.ms_per_step) for each in (base, row)]
    unit = "ms per token" if work == DECODE else tables.UNITS[work]
    if work == DECODE and point.scaling == STRONG:
        work = f"decode of {row.num_requests}"
    elif work == DECODE:
        work, faster = f"decode of {point.num_requests} per device", "times the tokens"
    sizes = f"{base.tensor_parallel_size} to {row.tensor_parallel_size} devices"
    return f"{work}, {sizes}: {' to '.join(figures)} {unit}, {point.speed_up:.2f} {faster}, efficiency {point.efficiency:.0%}"


def _about(plan: Plan, results: Results) -> list[str]:
    environment = results.environment
    lengths = []
    if DECODE in plan.works:
        lengths.append(f"decode of {plan.output_len - 1} steps after prompts of {plan.input_len} tokens")
    if PREFILL in plan.works:
        lengths.append(f"prefill of {plan.prefill_prompts} prompts of {plan.input_len} tokens")
    if MIXED in plan.works:
        num_prompt, num_output = (sum(column) for column in zip(*plan.requests, strict=True))
        lengths.append(f"mixed work of {len(plan.requests)} requests with {num_prompt} prompt and {num_output} output tokens")
    lines = [
        f"{results.started_at} UTC, jaxllm {environment.get('jaxllm', '')}, Python {environment.get('python', '').split(' ')[0]}",
        f"command: {results.command}",
        "; ".join(lengths) + f"; the fastest of {plan.repeats} runs each",
    ]
    for size in results.sizes:
        if size.limits:
            copy, product = (tables.number(size.limits[f"{name}_per_second"] / 1e12) for name in ("copy_bytes", "gemm_flops"))
            line = f"tensor-parallel size {size.tensor_parallel_size}: {size.seconds:.0f} s in all, copy {copy} TB/s, "
            line += f"{size.limits['gemm_dtype']} product {product} TFLOP/s"
            if size.engine:
                kernels = ", ".join(f"{op} {name}" for op, name in size.engine["kernels"].items()) or "none"
                line += f", jax {size.engine['jax']}, kernels: {kernels}"
            lines.append(line)
    return lines


def _problems(results: Results) -> list[str]:
    found = ["the experiment was interrupted"] if results.interrupted else []
    for size in results.sizes:
        where = f"tensor-parallel size {size.tensor_parallel_size}"
        if size.failure:
            found.append(f"{where}: {size.failure}")
        found += [f"{where}, {skipped}: {skipped.reason}" for skipped in size.skipped]
    return found


def _longest(results: Results) -> list[str]:
    lines = []
    for found in results.breakdowns:
        lines.append(f"{found.work} of {found.num_requests}, {found.tensor_parallel_size} devices, per step:")
        lines += [f"  {ms:9.4f} ms x{count:6.1f}  {part:14} {name[:90]}" for name, part, ms, count in found.top]
    return lines
