"""Writes an experiment's files: results.json, results.csv, report.md, report.html and the charts."""

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.files import read_json
from jaxllm.scaling import charts, tables
from jaxllm.scaling.document import (
    PLOTS_FOLDER,
    Block,
    Charts,
    Folded,
    Heading,
    Points,
    Text,
    as_html_page,
    as_markdown_page,
)
from jaxllm.scaling.figures import Point, points
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.plots import Plot, plots
from jaxllm.scaling.rows import CPU_THUNKS, DECODE, MIXED, PREFILL, Results, from_json, to_json

JSON_FILE, CSV_FILE, MARKDOWN_FILE, HTML_FILE = "results.json", "results.csv", "report.md", "report.html"
LOGS_FOLDER = "logs"
ABOUT_ROWS = (
    "Decode: milliseconds per token of each request, in steps that decode all requests and nothing else. Prefill: prompt tokens per "
    "second. Mixed: output tokens per second of requests of differing lengths, all given at once. tok/s counts output tokens, of "
    "prefill prompt tokens. Each figure is of the fastest run; results.json has all of them, and every step of the fastest decode. "
    "Speed-up is the ratio of tokens per second to those on the fewest devices; efficiency is speed-up over the ratio of devices. "
    "Of the limit: the time that the bytes and operations of each device take at its measured speed, over the measured time; "
    "communication is not in the limit. Launch: host time of launching a step, which runs beside the device."
)
ABOUT_WEAK = (
    "The number of requests grows with the devices, so each device reads as many keys and values, and computes as much, at every size. "
    "Its share of the weights still shrinks, and small batches spend most of their time on weights: an efficiency far above 100 % is "
    "usual there. The share of the limit takes that into account."
)
ABOUT_PARTS = (
    "Milliseconds per step, mean over the devices, from a profiler's trace of some steps. A moment in which several kernels run "
    "counts once: for products before attention, others and communication, so communication is what nothing hides. Waiting is the "
    "part of it in which a device waited for the last one. Gaps: the untraced time of a step less the time in which a kernel runs. "
    "Launch: host time of launching a step, beside the device. Traced: a step's time under the profiler, which slows the host."
)
ABOUT_THUNKS = (
    "On a CPU these are the operations that XLA ran under the profiler, by their names. Attention cannot be told from others there; "
    "gaps and waiting are not measured on a CPU, whose devices share the cores."
)
ABOUT_ALL_REDUCES = (
    "A sum of hidden states [rows, width] over all devices, measured alone, one after the other: by XLA's own means (xla, NCCL on "
    "GPUs), and where GPUs can access each other's memory by kernels that do so (peer). "
    "Bus: bytes that a device sends by the ring algorithm, per second. Per step: two per layer."
)
ABOUT_CPU = (
    "The devices are parts of one CPU and share its cores: these figures show that the experiment runs, not how a model scales. "
    "The limits are those of memory and of large products; a small model stays in the caches, and may be faster."
)


def write(directory: Path, plan: Plan, results: Results) -> None:
    """All files. Raises ConfigError if one cannot be written."""
    drawn = plots(plan, results)
    title, blocks = document(plan, results, drawn)
    texts = {
        JSON_FILE: json.dumps(to_json(results), indent=1, ensure_ascii=False) + "\n",
        CSV_FILE: as_csv(plan, results),
        MARKDOWN_FILE: as_markdown_page(title, blocks),
        HTML_FILE: as_html_page(title, blocks),
        **{f"{PLOTS_FOLDER}/{plot.name}.svg": charts.as_file(plot.svg) for plot in drawn},
    }
    try:
        (directory / PLOTS_FOLDER).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _replace(directory / name, text)
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


def document(plan: Plan, results: Results, drawn: Sequence[Plot]) -> tuple[str, list[Block]]:
    """Title and blocks of the report."""
    engines = [size.engine for size in results.sizes if size.engine]
    device = engines[0]["device"] if engines else "no device"
    by_name = {plot.name: plot for plot in drawn}

    def charts_of(*names: str) -> list[Block]:
        found = [by_name[name] for name in names if name in by_name]
        return [Charts(found)] if found else []

    blocks: list[Block] = [Points(_about(plan, results))]
    if engines and engines[0]["platform"] == "cpu":
        blocks.append(Text(ABOUT_CPU))
    if short := in_short(plan, results):
        blocks += [Heading("In short"), Points(short)]
    if problems := _problems(results):
        blocks += [Heading("What is missing"), Points(problems)]
    if results.rows:
        blocks += [Heading("Measurements"), tables.main_table(plan, results.rows), Text(ABOUT_ROWS)]
        blocks += charts_of("time_per_token", "tokens_per_second", "tokens_per_second_per_device", "throughput")
        blocks += charts_of("speed_up", "efficiency")
    weak = tables.weak_table(plan, results.rows)
    if weak.lines:
        blocks += [Heading("Weak scaling"), weak, Text(ABOUT_WEAK), *charts_of("weak_time_per_token", "weak_efficiency")]
    if results.breakdowns:
        blocks += [Heading("Where the time of a step goes"), tables.parts_table(results), Text(ABOUT_PARTS)]
        if any(found.source == CPU_THUNKS for found in results.breakdowns):
            blocks.append(Text(ABOUT_THUNKS))
        blocks += charts_of("step_parts_decode", "step_parts_prefill")
        blocks.append(Folded("The longest kernels", _longest(results)))
    if any(size.all_reduces for size in results.sizes):
        blocks += [Heading("All-reduces"), tables.all_reduce_table(results), Text(ABOUT_ALL_REDUCES)]
    if any(size.limits for size in results.sizes):
        blocks += [Heading("Limits of one device, measured"), tables.limits_table(results)]
    environment = [f"{name}: {value}" for name, value in results.environment.items()]
    options = [f"{name}: {value}" for name, value in (engines[-1]["options"] if engines else plan.options).items()]
    blocks += [
        Heading("Environment"),
        Folded("Versions, devices and variables", environment),
        Folded("Engine options", options),
    ]
    return f"Tensor-parallel scaling of {_model_name(plan)} on {device}", blocks


def in_short(plan: Plan, results: Results) -> list[str]:
    """One sentence for each piece of work that was measured on several sizes."""
    last: dict[tuple[str, str, int], Point] = {}
    for point in points(plan, results.rows):
        if point.ideal > 1:
            last[point.scaling, point.row.work, point.num_requests] = point
    return [_sentence(point) for point in last.values()]


def _sentence(point: Point) -> str:
    base, row = point.base, point.row
    sizes = f"{base.tensor_parallel_size} to {row.tensor_parallel_size} devices"
    if row.work != DECODE:
        rates = f"{tables.number(base.tokens_per_second)} to {tables.number(row.tokens_per_second)} {tables.UNITS[row.work]}"
        return f"{row.work}, {sizes}: {rates}, {point.speed_up:.2f} times as fast, efficiency {point.efficiency:.0%}"
    times = f"{tables.number(base.ms_per_step)} to {tables.number(row.ms_per_step)} ms per token"
    if point.num_requests == row.num_requests and point.scaling == "strong":
        work = f"decode of {row.num_requests}"
        return f"{work}, {sizes}: {times}, {point.speed_up:.2f} times as fast, efficiency {point.efficiency:.0%}"
    work = f"decode of {point.num_requests} per device"
    return f"{work}, {sizes}: {times}, {point.speed_up:.2f} times the tokens, efficiency {point.efficiency:.0%}"


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
    lines += [
        f"tensor-parallel size {size.tensor_parallel_size}: {size.seconds:.0f} s in all, {tables.limits(size.limits)}"
        + (f", jax {size.engine['jax']}, kernels: {_named(size.engine['kernels'])}" if size.engine else "")
        for size in results.sizes
        if size.limits
    ]
    return lines


def _problems(results: Results) -> list[str]:
    found = ["the experiment was interrupted"] if results.interrupted else []
    for size in results.sizes:
        where = f"tensor-parallel size {size.tensor_parallel_size}"
        if size.failure:
            found.append(f"{where}: {size.failure}")
        for skipped in size.skipped:
            count = f" of {skipped.num_requests}" if skipped.num_requests else ""
            found.append(f"{where}, {skipped.work}{count}: {skipped.reason}")
    return found


def _longest(results: Results) -> list[str]:
    lines = []
    for found in results.breakdowns:
        lines.append(f"{found.work} of {found.num_requests}, {found.tensor_parallel_size} devices, per step:")
        lines += [f"  {ms:9.4f} ms x{count:6.1f}  {part:14} {name[:90]}" for name, part, ms, count in found.top]
    return lines


def _named(kernels: dict[str, str]) -> str:
    return ", ".join(f"{op} {name}" for op, name in kernels.items()) or "none"


def _model_name(plan: Plan) -> str:
    return Path(plan.model).name or plan.model


def _replace(path: Path, text: str) -> None:
    """Write a file atomically: a reader gets the old file or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
