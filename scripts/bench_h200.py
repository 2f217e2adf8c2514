"""Runs the work of a recorded vLLM measurement through `LLM` with dummy weights; prints both with the device's limit and a goal.

usage: bench_h200.py MODEL_DIR … [--recorded FILE] [--mix FILE] [--goals FILE] [--rows 1,64,mixed,…] [--json FILE] [--markdown FILE]
                     [engine options as name=value …]

Method, the same as the record's: token-id prompts from numpy default_rng(attempt).integers(0, vocab_size - 256), greedy, ignore_eos,
no detokenizing, prefix caching off, every row run as often as the record's (else twice) and the fastest kept; time per output
token (tpot) = (time of +257 tokens minus time of +1 token) / 256; the whole `LLM.generate` call is timed, nothing is left out.
With many rows tpot can pass its limit, because requests decode with prompts of others. A decode row has none of that: all
prompts are computed, then 256 steps of the engine are timed, each of which must decode every row (else the row says so).
decode16@16K has 16 requests with prompts of 16384 tokens, prefill1@128k is the prefill alone of a prompt of 128000; max_model_len
is what the longest row needs, unless it is given. Kernels may differ by it, so compare rows of runs with the same.

limit: the least time that the row's bytes and operations take (jaxllm/measuring/limits.py) at the speed of a copy and of a large
bf16 product in the same run. idle: share of the time without a kernel. Stretches of such work are traced after all rows are timed;
what the kernels took there is set against the time that the same work takes untraced (against the traced time, to which the
profiler adds, where no row tells that: mixed and 128). Each of several models runs in a separate process.

Dummy weights are drawn in the form that config.json says: for weights in 4 or 8 bits give another quantization_config, as
hf_overrides={"quantization_config": {"quant_method": "compressed-tensors", …}}.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.measuring import trace

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {trace.COMMAND_BUFFERS_WHILE_PROFILING}"

import jax

from jaxllm import LLM
from jaxllm.errors import ConfigError
from jaxllm.measuring.limits import Ceilings, ModelCost, measure_ceilings
from jaxllm.measuring.runs import SETTLING_STEPS, Run, greedy, random_prompts, time_decodes, time_requests
from jaxllm.parallel.mesh import tensor_size
from jaxllm.parallel.topology import Topology
from jaxllm.runner.memory import reserve_device_memory
from scripts.measuring.asked import LONG, Asked, max_model_len, read_rows
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.describe import describe_ceilings
from scripts.measuring.idle import trace_idle_share
from scripts.measuring.rows import HEADER, Row, markdown_table

SECONDS_FOR_TRACES = 25.0
Lengths = list[tuple[int, int]]


def main() -> None:
    """Measure each model."""
    parser = script_parser(__doc__, 5)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL_DIR_or_name=value", help="models, and engine options")
    parser.add_argument("--recorded", type=Path, help="JSON with vLLM's rows")
    parser.add_argument("--mix", type=Path, help="JSON with [prompt, output] lengths; without it there is no row 'mixed'")
    parser.add_argument("--goals", type=Path, help="JSON {model: {row: figure in the row's unit}}")
    parser.add_argument(
        "--rows",
        default="1,decode1,64,decode64,mixed,16,decode16,256,decode256,128",
        help="batch sizes, decode and a batch size, decode and prefill at a number of prompt tokens (decode16@16K), mixed, 128, and\n"
        f"long for {LONG}; the most important first",
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="for all rows of a model, once its engine stands")
    parser.add_argument("--no-traces", action="store_true", help="leave the idle share out")
    parser.add_argument("--prompt", type=int, default=1024, help="prompt tokens of the batch rows")
    parser.add_argument("--output", type=int, default=257, help="output tokens of the batch rows")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the rows mixed and 128")
    parser.add_argument("--tiny", action="store_true", help="small ceilings, for a machine without a GPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    args = parser.parse_intermixed_args()
    try:
        read_rows(args.rows)
    except ValueError as error:
        parser.error(str(error))
    options = [str(word) for word in args.models if "=" in str(word)]
    models = [path for path in args.models if "=" not in str(path)]
    if not models:
        parser.error("no model is given")
    found, tables = {}, []
    for model in models:
        if len(models) == 1:
            result, table = Bench(model, options, args).run()
        else:
            result, table = _in_a_process(model, options, args)
        found[model.name] = result
        tables.append(table)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
        if args.markdown:
            args.markdown.write_text("\n\n".join(tables) + "\n")
    if any("error" in result for result in found.values()):
        sys.exit("not every model could be measured")


def _in_a_process(model: Path, options: list[str], args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """This script for one of several models."""
    values = {
        name: getattr(args, name) for name in ("recorded", "mix", "goals", "rows", "seconds", "prompt", "output", "requests")
    }
    flags = [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
    flags += ["--tiny"] * args.tiny + ["--no-traces"] * args.no_traces
    with tempfile.TemporaryDirectory() as directory:
        results, table = Path(directory, "results.json"), Path(directory, "table.md")
        command = [sys.executable, __file__, str(model), *options, *flags, "--json", str(results), "--markdown", str(table)]
        if subprocess.run(command).returncode != 0:
            return {"error": "failed"}, f"**{model.name}** failed"
        return json.loads(results.read_text())[model.name], table.read_text().rstrip()


class Bench:
    """One model's engine and the rows found so far."""

    def __init__(self, model: Path, options: list[str], args: argparse.Namespace):
        self.args = args
        self.name = model.name
        self.recorded = _recorded(args.recorded, model.name)
        self.goals = json.loads(args.goals.read_text()).get(model.name, {}) if args.goals else {}
        self.asked = [asked for asked in read_rows(args.rows) if asked.name != "mixed" or args.mix]
        config = {"load_format": "dummy", "enable_prefix_caching": False, "skip_tokenizer_init": True}
        config["max_model_len"] = max_model_len(self.asked, args.output)
        config |= dict(map(engine_option, options))
        # The ceilings start the device, the engine comes after.
        reserve_device_memory(config.get("gpu_memory_utilization", 0.92), Topology(config.get("tensor_parallel_size", 1)))
        self.ceilings: Ceilings = measure_ceilings(tiny=args.tiny)
        print(f"\n{self.name} on {jax.devices()[0].device_kind}: {describe_ceilings(self.ceilings)}", flush=True)
        started = time.perf_counter()
        self.llm = LLM(model=str(model), **config)
        self.start_seconds = time.perf_counter() - started
        self.llm.llm_engine.finish_compiling()
        self.core: Any = self.llm.llm_engine.core
        runner = self.core.runner
        self.cost = ModelCost.of_arrays(self.core.model_config, runner.params, tensor_size(runner.shapes.mesh))
        print(
            f"engine start {self.start_seconds:.1f} s, {len(runner.programs)} programs; a step reads {self.cost.weight_bytes / 1e9:.2f} GB "
            f"of weights and {self.cost.cache_bytes_per_token / 1e3:.1f} kB a token of context",
            flush=True,
        )
        self.rows: dict[str, Row] = {}
        self.started = time.perf_counter()

    @property
    def left(self) -> float:
        return self.args.seconds - (time.perf_counter() - self.started)

    @property
    def left_for_rows(self) -> float:
        return self.left - (0 if self.args.no_traces else SECONDS_FOR_TRACES)

    def run(self) -> tuple[dict[str, Any], str]:
        """All rows, then all traces."""
        for asked in self.asked:
            if asked.kind == "decode":
                self.measure_decode(asked)
            elif asked.kind == "prefill":
                self.measure_prefill(asked.num_requests, asked.num_tokens or self.args.prompt)
            elif asked.kind == "batch":
                self.measure_batch(asked.num_requests)
            else:
                self.measure_requests(asked.name)
        compiled = self.core.num_compiled_after_warmup
        print(f"compiled after warm-up: {compiled}\n\n{self.table(compiled)}\n", flush=True)  # in case a trace fails
        for asked in () if self.args.no_traces else self.asked:
            if asked.kind == "decode":
                self.trace_decode(self.decode_name(asked), asked.num_requests, asked.num_tokens or self.args.prompt)
            elif asked.kind == "prefill":
                self.trace_prefill(asked.num_requests, asked.num_tokens or self.args.prompt)
            elif asked.kind == "batch":
                self.trace_batch(asked.num_requests)
            else:
                self.trace_requests(asked.name)
        table = self.table(compiled)
        print(f"\n{table}\n\n{time.perf_counter() - self.started:.0f} s after the engine's start", flush=True)
        result = {
            "device": jax.devices()[0].device_kind,
            "copy_TB/s": self.ceilings.copy_bytes_per_second / 1e12,
            "gemm_TFLOP/s": self.ceilings.gemm_flops_per_second / 1e12,
            "engine_start_s": self.start_seconds,
            "programs": len(self.core.runner.programs),
            "compiled_after_warmup": compiled,
            "rows": {row.name: vars(row) | {"of_limit": row.better(row.limit)} for row in self.rows.values()},
        }
        self.llm.shutdown()
        return result, table

    def table(self, compiled: int) -> str:
        """Markdown for docs/MEASUREMENTS.md."""
        lines = [
            f"**{self.name}**, {jax.devices()[0].device_kind}, {describe_ceilings(self.ceilings)}; "
            f"engine start {self.start_seconds:.0f} s, {len(self.core.runner.programs)} programs, {compiled} compiled after warm-up",
            "",
            markdown_table(HEADER, [row.cells() for row in self.rows.values()]),
        ]
        return "\n".join(lines)

    def measure_batch(self, batch: int) -> None:
        """tpot and prefill of a batch."""
        args = self.args
        as_recorded = (args.prompt, args.output) == (1024, 257)
        recorded = self.recorded if as_recorded else {}
        record = recorded.get(f"tpot {batch}", {})
        short = self.timed([(args.prompt, 1)] * batch, recorded.get(f"prefill {batch}x1024", {}))
        long = self.timed([(args.prompt, args.output)] * batch, recorded.get(f"{batch}x1024+257", {}))
        if short is None or long is None:
            print(f"batch {batch} is left out: there is no time for it", flush=True)
            return
        steps = args.output - 1
        work = self.cost.work([(args.prompt, args.output)] * batch, num_steps=steps, skip_prompts=True)
        self.add(
            Row(
                f"tpot {batch}",
                "ms",
                value=(min(long["seconds"]) - min(short["seconds"])) / steps * 1e3,
                limit=self.ceilings.seconds(work) / steps * 1e3,
                vllm=record.get("ms"),
                seconds=long["seconds"],
                details=long["details"],
            )
        )
        self.add_prefill(batch, args.prompt, short, record)

    def measure_prefill(self, batch: int, prompt: int) -> None:
        """Prefill alone of a batch."""
        found = self.timed([(prompt, 1)] * batch, {})
        if found is None:
            print(f"prefill {batch}x{prompt} is left out: there is no time for it", flush=True)
            return
        self.add_prefill(batch, prompt, found, {})

    def add_prefill(self, batch: int, prompt: int, found: dict[str, Any], record: dict[str, Any]) -> None:
        tokens = batch * prompt
        work = self.cost.work([(prompt, 1)] * batch, num_steps=1)
        self.add(
            Row(
                f"prefill {batch}x{prompt}",
                "tok/s",
                value=tokens / min(found["seconds"]),
                limit=tokens / self.ceilings.seconds(work),
                vllm=record.get("prefill_tok_s"),
                seconds=found["seconds"],
                details=found["details"],
            )
        )

    def decode_name(self, asked: Asked) -> str:
        return f"decode {asked.num_requests}" + (f" at {asked.num_tokens}" if asked.num_tokens else "")

    def measure_decode(self, asked: Asked) -> None:
        """Decode steps alone of a batch whose prompts are computed."""
        args, batch, name = self.args, asked.num_requests, self.decode_name(asked)
        prompt = asked.num_tokens or args.prompt
        steps, runs = args.output - 1, []
        tpot = None if asked.num_tokens else self.rows.get(f"tpot {batch}")
        expected = min(tpot.seconds) if tpot else 0.0
        params = [greedy(self.llm.llm_engine.max_model_len - prompt)] * batch
        for attempt in range(2):
            if self.left_for_rows < expected:
                break
            start = time.perf_counter()
            prompts = self.prompts([(prompt, 1)] * batch, seed=attempt)
            try:
                runs.append(time_decodes(self.llm.llm_engine, prompts, params, num_steps=steps))
            except ConfigError:
                print(f"{name} is left out: the engine cannot run so many at once for so long", flush=True)
                return
            expected = time.perf_counter() - start
        if not runs:
            print(f"{name} is left out: there is no time for it", flush=True)
            return
        best = min(runs, key=lambda run: run.seconds)
        work = self.cost.work([(n, steps + 1) for n in best.contexts], num_steps=steps, skip_prompts=True)
        self.add(
            Row(
                name,
                "ms",
                value=best.seconds / steps * 1e3,
                limit=self.ceilings.seconds(work) / steps * 1e3,
                seconds=[run.seconds for run in runs],
                details=_details(best),
                note=best.note,
            )
        )

    def requests(self, name: str) -> tuple[str, Lengths]:
        """Name and lengths of a row of many requests."""
        count = self.args.requests
        if name == "mixed":
            lengths = [tuple(pair) for pair in json.loads(self.args.mix.read_text())["requests"][:count]]
            return f"mixed_{len(lengths)}", lengths
        size = int(name)
        return f"{count}x{size}+{size}", [(size, size)] * count

    def measure_requests(self, name: str) -> None:
        """Output tokens per second of many requests at once."""
        row_name, lengths = self.requests(name)
        record = self.recorded.get(row_name, {})
        found = self.timed(lengths, record)
        if found is None:
            print(f"{row_name} is left out: there is no time for it", flush=True)
            return
        num_out = sum(n for _, n in lengths)
        max_rows = self.core.config.scheduler.max_num_seqs
        num_steps = max(max(n for _, n in lengths), -(-num_out // max_rows))
        limit = num_out / self.ceilings.seconds(self.cost.work(lengths, num_steps=num_steps))
        self.add(
            Row(
                row_name,
                "output tok/s",
                value=num_out / min(found["seconds"]),
                limit=limit,
                vllm=record.get("out_tok_s"),
                seconds=found["seconds"],
                details=found["details"],
            )
        )

    def add(self, row: Row) -> None:
        row.goal = self.goals.get(row.name)
        self.rows[row.name] = row
        details = ", ".join(f"{name} {value:.3g}" for name, value in row.details.items())
        cells = row.cells()
        print(
            f"{cells[0]}: {cells[1]} | vLLM {cells[2]}, {cells[3]} | limit {cells[4]}, {cells[5]} of it | {details}", flush=True
        )

    def timed(self, lengths: Lengths, record: dict[str, Any]) -> dict[str, Any] | None:
        """Seconds of each attempt, and the host times of the fastest; None if there is no time."""
        seconds: list[float] = []
        details: dict[str, float] = {}
        expected = 2 * min(record.get("times_s", [0.0]))
        for attempt in range(len(record.get("times_s", [0, 0]))):
            if self.left_for_rows < expected:
                break
            run = time_requests(self.llm, lengths, seed=attempt)
            expected = run.seconds
            if not seconds or expected < min(seconds):
                details = _details(run)
            seconds.append(expected)
        return {"seconds": seconds, "details": details} if seconds else None

    def prompts(self, lengths: Lengths, seed: int) -> list[dict[str, list[int]]]:
        return random_prompts([n for n, _ in lengths], self.core.model_config.vocab_size, seed)

    def trace_batch(self, batch: int) -> None:
        """Idle shares of a prefill, and of a steady decode unless a row of decodes alone gives it."""
        self.trace_prefill(batch, self.args.prompt)
        if f"decode {batch}" not in self.rows:
            self.trace_decode(f"tpot {batch}", batch, self.args.prompt, num_settling=3)

    def trace_prefill(self, batch: int, prompt: int) -> None:
        self.trace_row(f"prefill {batch}x{prompt}", [(prompt, 1)] * batch, None, None)

    def trace_decode(self, name: str, batch: int, prompt: int, num_settling: int = SETTLING_STEPS) -> None:
        """Idle share of a steady decode."""
        output = self.args.output
        # Requests that decode already take their tokens from the prompts' steps.
        room = self.core.config.scheduler.max_num_batched_tokens - batch
        skip = -(-batch * prompt // max(1, room)) + num_settling
        steps = min(32, max(1, output - 12))
        self.trace_row(name, [(prompt, output + skip)] * batch, skip, steps)

    def trace_requests(self, name: str) -> None:
        """Idle share of some steps in the middle."""
        row_name, lengths = self.requests(name)
        if row_name in self.rows:
            steps = int(self.rows[row_name].details["steps"])
            self.trace_row(row_name, lengths, min(200, steps // 4), min(60, max(1, steps // 4)))

    def trace_row(self, name: str, lengths: Lengths, skip: int | None, num_steps: int | None) -> None:
        """Record `num_steps` steps after `skip` others, or the whole from the first request's arrival."""
        row = self.rows.get(name)
        if row is None or self.left < min(row.seconds) * (1 if skip is None else 0.5) + 4:
            return
        prompts, params = self.prompts(lengths, seed=2), [greedy(n) for _, n in lengths]
        trace_idle_share(self.llm.llm_engine, row, prompts, params, skip=skip, num_steps=num_steps)


def _details(run: Run) -> dict[str, float]:
    """A row's figures of its fastest run."""
    found = {"steps": run.num_steps} | {f"{name}_ms_per_step": ms for name, ms in run.host_ms.items()}
    return found if run.mean_context is None else found | {"context": run.mean_context}


def _recorded(path: Path | None, model: str) -> dict[str, dict[str, Any]]:
    rows = json.loads(path.read_text()).get(model, []) if path else []
    return {row["name"]: row for row in rows if "name" in row}


if __name__ == "__main__":
    main()
