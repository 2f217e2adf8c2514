"""`jaxllm bench scaling`: measures how a model's speed grows with the devices that its layers are split over."""

import argparse
import datetime
import functools
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.cli import env, options, terminal
from jaxllm.cli.bench_serve import read_mix
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.numbers import above_zero, count, names, positive, several
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.config import Flag
from jaxllm.errors import ConfigError
from jaxllm.scaling import experiment, report
from jaxllm.scaling.plan import DECODE, MIXED, SCALINGS, WORKS, Plan, mixed_requests
from jaxllm.scaling.processes import environment_of, find_devices, measure_size
from jaxllm.scaling.results import Results, SizeResult
from jaxllm.scaling.tables import KERNELS, LIMITS, MEASUREMENTS, Table, tables

ABOUT = (
    "Measure decode, prefill and mixed work with the layers split over 1, 2, 4 … devices, each size in a process of its own: "
    "speed-up, efficiency, the share of what the devices allow, and where the time of a step goes."
)
EXAMPLES = """examples:
  jaxllm bench scaling meta-llama/Llama-3.1-8B --load-format dummy --output scaling/
  jaxllm bench scaling MODEL_DIR --tensor-parallel-sizes 1,2,4 --batch-sizes 1,64 --work decode,prefill --timeout 240 --output a/
  jaxllm bench scaling --with a/results.json b/results.json --output both/      one report of several runs, nothing is measured
  jaxllm bench scaling demo --devices cpu:4 --batch-sizes 1,4 --input-len 32 --output-len 16       without a GPU"""
DEFAULT_MIXED_REQUESTS = 200
NO_FLAGS = (
    *("tensor_parallel_size", "use_progress_bar", "profiler_dir"),
    *("pipeline_parallel_size", "pipeline_parallel_layers"),  # one stage is what the figures are of
    *("tokenizer", "skip_tokenizer_init", "chat_template"),  # prompts are token ids, and outputs are not detokenized
)


def scaling_flags() -> list[Flag]:
    """The engine's options, without those that the experiment sets or does not use."""
    return [flag for flag in engine_flags() if flag.name not in NO_FLAGS]


def add_arguments(parser: Parser) -> None:
    parser.add_model()
    add = parser.add_argument
    sizes = "numbers of devices to split layers over; default: the powers of two up to the devices there are"
    add("--tensor-parallel-sizes", type=several(positive), help=sizes)
    batches = "requests that decode at once; in weak scaling for each device (default: 1,16,64,256)"
    add("--batch-sizes", type=several(positive), default=(1, 16, 64, 256), help=batches)
    add("--input-len", type=positive, default=1024, help="tokens of each prompt")
    add("--output-len", type=positive, default=256, help="tokens of each request; decode times one step less")
    add("--work", type=names(WORKS), default=WORKS, help=f"which of {','.join(WORKS)} (default: all)")
    kinds = "strong: the same batch sizes at each size; weak: decode with batch size times devices (default: strong,weak)"
    add("--scaling", type=names(SCALINGS), default=SCALINGS, help=kinds)
    add("--num-prompts", type=positive, default=64, help="prompts of prefill")
    lengths = 'lengths of the mixed work from a JSON file: {"requests": [[prompt, output], …]}'
    add("--requests", metavar="FILE", help=lengths)
    number = "requests of the mixed work, of a file the first ones; default: the whole file, else 200 of random lengths"
    add("--num-requests", type=positive, help=number)
    add("--repeats", type=positive, default=2, help="runs of each piece of work; the fastest counts")
    add("--trace-steps", type=count, default=8, help="steps traced to see where their time goes; 0: none")
    longest = "end a size that takes longer, and keep its results so far"
    add("--timeout", type=above_zero, metavar="SECONDS", help=longest)
    cpu = "N devices that share this machine's CPU; default: what JAX finds"
    add("--devices", type=_cpu_devices, metavar="cpu:N", help=cpu)
    files = "write results.json, results.csv, report.md, report.html, charts and logs there"
    add("--output", metavar="DIR", help=files)
    earlier = (
        "earlier results.json of the same experiment: their sizes join the report and are not measured again; without MODEL and "
        "--tensor-parallel-sizes nothing is measured"
    )
    add("--with", dest="earlier", nargs="+", default=[], metavar="FILE", help=earlier)
    add("--json", action="store_true", help="the results as a JSON object")
    options.add_log_arguments(parser)
    options.add_config_argument(parser)
    add("--dry-run", action="store_true", help="print what would be measured, measure nothing")
    parser.add_flags(scaling_flags())


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write. Returns the exit code: 1 if any requested result is missing, 130 after Ctrl-C."""
    output = None if arguments.output is None else report.make_directory(arguments.output)
    paths = [Path(path) for path in arguments.earlier]
    if paths and "model" not in arguments and arguments.tensor_parallel_sizes is None:
        results = experiment.join(paths, None)
        Screen(results, quiet=arguments.quiet, has_table=not arguments.json)
        return _finish(arguments, results, output)
    variables = environment_of(arguments.devices)
    devices = find_devices(variables)
    plan = _plan(arguments, devices)
    results = experiment.join(paths, plan) if paths else Results(plan)
    if arguments.dry_run:
        _print_plan(results, devices, plan.tensor_parallel_sizes)
        return 0
    found = {f"{devices['platform']} {number}": devices["kind"] for number in range(devices["count"])}
    results.environment = env.gather(devices=found)
    results.command = shlex.join(["jaxllm", *sys.argv[1:]])
    results.started_at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    screen = Screen(results, quiet=arguments.quiet, has_table=not arguments.json)
    with tempfile.TemporaryDirectory() as directory:
        measure = functools.partial(
            measure_size,
            variables=variables,
            timeout_seconds=arguments.timeout,
            logs=Path(directory) if output is None else output / report.LOGS_FOLDER,
            log_level="debug" if arguments.verbose else "info",
            hear=screen.hear,
        )
        experiment.run(results, plan.tensor_parallel_sizes, measure, output)
    return _finish(arguments, results, output)


def _finish(arguments: argparse.Namespace, results: Results, output: Path | None) -> int:
    if output is not None:
        report.write(output, results)
    if arguments.json:
        print(msgspec.json.encode(results).decode())
    else:
        _print_summary(results)
    if not arguments.quiet and output is not None:
        terminal.note(f"report written to {output / report.HTML_FILE}")
    if results.interrupted:
        return 130
    return 1 if results.problems else 0


class Screen:
    """Shows results as they come."""

    def __init__(self, results: Results, *, quiet: bool, has_table: bool):
        self._results, self._quiet, self._has_table = results, quiet, has_table
        self._began = time.monotonic()
        self._print(tables(results)[MEASUREMENTS], with_header=True)

    def hear(self, size: int, message: SizeResult | str) -> None:
        """Show a part of a size's results, or what is done now. A part is in the results already."""
        if isinstance(message, str):
            if not self._quiet:
                elapsed = terminal.duration(time.monotonic() - self._began)
                terminal.note(f"[{elapsed}] {terminal.counted(size, 'device')}: {message}")
        elif message.rows:
            table = tables(self._results)[MEASUREMENTS]
            lines = [line for line in table.lines if line["tensor_parallel_size"] == size]
            self._print(Table(table.columns, lines[-len(message.rows) :]))

    def _print(self, table: Table, *, with_header: bool = False) -> None:
        if self._has_table:
            print(table.as_text(with_header=with_header), flush=True)


def _print_summary(results: Results) -> None:
    """Print what all rows together say, and what is missing."""
    for heading, table in tables(results).items():
        if table.lines and heading not in (MEASUREMENTS, LIMITS, KERNELS):
            print(f"\n{heading}\n{table.as_text()}")
    for problem in results.problems:
        terminal.note(problem, "red")


def _plan(arguments: argparse.Namespace, devices: dict[str, Any]) -> Plan:
    asked = options.engine_options(arguments)
    if asked.pop("tensor_parallel_size", None) is not None:
        raise UsageError("tensor_parallel_size is what the experiment varies: unset it, and give --tensor-parallel-sizes")
    if asked.get("pipeline_parallel_size") not in (None, 1):
        raise UsageError("pipeline_parallel_size is set, but the experiment is about tensor parallelism alone: unset it")
    if DECODE in arguments.work and arguments.output_len < 2:
        raise UsageError("decode times the tokens after the first: give --output-len 2 or more")
    if MIXED not in arguments.work and (arguments.requests or arguments.num_requests):
        raise UsageError("--requests and --num-requests are for the mixed work; add it to --work")
    where = f"this machine ({devices['kind']})" if arguments.devices is None else f"--devices cpu:{arguments.devices}"
    sizes = arguments.tensor_parallel_sizes or tuple(2**i for i in range(devices["count"].bit_length()))
    if too_large := [size for size in sizes if size > devices["count"]]:
        raise ConfigError(
            f"tensor-parallel size {', '.join(map(str, too_large))} needs more devices than the {devices['count']} of {where}; "
            f"give --tensor-parallel-sizes {','.join(str(size) for size in sizes if size not in too_large) or '1'}"
        )
    return Plan(
        model=asked.pop("model", "demo"),
        tensor_parallel_sizes=sizes,
        batch_sizes=arguments.batch_sizes,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        works=arguments.work,
        scalings=arguments.scaling,
        prefill_prompts=arguments.num_prompts,
        requests=_requests(arguments) if MIXED in arguments.work else (),
        repeats=arguments.repeats,
        trace_steps=arguments.trace_steps,
        options=msgspec.to_builtins(asked),
    )


def _requests(arguments: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    if arguments.requests is None:
        return mixed_requests(arguments.num_requests or DEFAULT_MIXED_REQUESTS, arguments.input_len, arguments.output_len)
    return tuple(read_mix(arguments.requests, arguments.num_requests, "--num-requests"))


def _print_plan(results: Results, devices: dict[str, Any], sizes: tuple[int, ...]) -> None:
    plan = results.plan
    print(f"{plan.model} on {devices['count']} × {devices['kind']} ({devices['platform']})")
    for size in sizes:
        work = [f"decode of {batch}" for batch in plan.decode_batches(size)]
        work += ["prefill"] * ("prefill" in plan.works) + ["mixed"] * (MIXED in plan.works) + ["all-reduce"] * (size > 1)
        is_done = size in results.complete_sizes
        print(f"tensor-parallel size {size}: {'measured already' if is_done else ', '.join(work)}")


def _cpu_devices(text: str) -> int:
    match = re.fullmatch(r"cpu:(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} must be cpu:N with N from 1 to 64; without it JAX's devices are used")
    return int(match[1])
