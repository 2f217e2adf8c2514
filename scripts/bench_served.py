"""Measures `jaxllm serve` with dummy weights under the loads of `jaxllm bench serve`; prints what clients see as a Markdown table.

One server for all loads, prefix caching off. Random prompts of 512 ± 50 % token ids, 128 ± 50 % tokens out, greedy, ignore_eos,
Poisson arrivals. A short load comes before the measured ones. The server is stopped at the end, whatever happens.

    python scripts/bench_served.py MODEL_DIR --json served.json
    python scripts/bench_served.py MODEL_DIR --loads 32:0:320 inf:0:512 --server-flags='--quantization fp8'
    python scripts/bench_served.py --tiny

idle: share of the time with unfinished requests in which no step was on the device or queued there.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.http_client.scrape import Scrape, read_scrape
from scripts.measuring.rows import markdown_table
from scripts.soaking.processes import RUN, started_server

ROOT = Path(__file__).resolve().parent.parent
SERVER_FLAGS = ("--load-format", "dummy", "--max-model-len", "4096", "--no-enable-prefix-caching")
CLIENT_FLAGS = ("--input-len", "512", "--output-len", "128", "--vocab-size", "100000")
LOADS = "8:0:160 32:0:320 32:5:320 32:6:320 inf:0:512 inf:5:512"
TINY_SERVER_FLAGS = ("--max-model-len", "256", "--max-num-seqs", "8", "--token-buckets", "256", "--decode-buckets", "8")
TINY_CLIENT_FLAGS = ("--input-len", "16", "--output-len", "8", "--vocab-size", "200")
TINY_LOADS = "8:0:8 inf:0:8"
HEADER = (
    "requests/s",
    "seed",
    "time to first token, median",
    "p99",
    "per output token, median",
    "p99",
    "output tokens/s",
    "idle",
)
SETTLE_SECONDS = 1.5
"""Seconds until the metrics include the last step: heartbeats come four times a second, the API servers' counts each second."""


@dataclass(frozen=True)
class Load:
    """Requests that arrive at a rate (infinite: all at once), with prompts and times by the seed."""

    rate: float
    seed: int
    num_prompts: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        """RATE:SEED:REQUESTS"""
        rate, seed, num_prompts = text.split(":")
        load = cls(float(rate), int(seed), int(num_prompts))
        if not (load.rate > 0 and load.num_prompts > 0):
            raise ValueError("rate and number of requests must be above 0")
        return load

    @property
    def seconds(self) -> float:
        """In which they arrive."""
        return self.num_prompts / self.rate


@dataclass(frozen=True)
class Result:
    """The clients' measurements of a load, and the server's counts during it."""

    load: Load
    report: dict[str, Any]
    idle: float
    num_compiled: int
    """Programs compiled after warm-up since the server's start."""

    def cells(self) -> list[str]:
        """A line of the table, in milliseconds."""
        rate = f"all {self.load.num_prompts} at once" if math.isinf(self.load.rate) else f"{self.load.rate:g}"
        if self.report["failed"]:
            rate += f" ({self.report['failed']} failed)"
        times = [self.report[f"{kind}_{name}_ms"] for name in ("ttft", "tpot") for kind in ("median", "p99")]
        rest = [f"{self.report['output_throughput']:.0f}", f"{self.idle:.2%}"]
        return [rate, str(self.load.seed), *(f"{ms:.1f}" if ms > 20 else f"{ms:.2f}" for ms in times), *rest]


class Bench:
    """A server and the loads put on it so far."""

    def __init__(self, url: str, client_flags: tuple[str, ...], deadline: float):
        self.url, self.client_flags, self.deadline = url, client_flags, deadline
        self.results: list[Result] = []

    def warm_up(self) -> None:
        self._ask(Load(math.inf, 1000, 16))

    def measure(self, load: Load) -> None:
        """Put a load on the server. Raises subprocess.TimeoutExpired if the time is up before it has ended."""
        before = self.scrape()
        report = self._ask(load)
        time.sleep(SETTLE_SECONDS)
        after = self.scrape()
        idle_seconds, work_seconds = (
            after.values[name] - before.values[name] for name in ("device_idle_seconds", "engine_work_seconds")
        )
        idle = idle_seconds / max(work_seconds, 1e-9)
        self.results.append(Result(load, report, idle, round(after.values["programs_compiled_after_warmup"])))

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def scrape(self) -> Scrape:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as page:
            return read_scrape(page.read().decode(), time.monotonic())

    def _ask(self, load: Load) -> dict[str, Any]:
        flags = ["--base-url", self.url, "--request-rate", f"{load.rate:g}", "--num-prompts", str(load.num_prompts)]
        flags += ["--seed", str(load.seed), "--range-ratio", "0.5", "--ignore-eos", "--json", "--quiet", *self.client_flags]
        command = [sys.executable, "-c", RUN, "bench", "serve", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(self.left, 1.0))
        if done.returncode != 0:
            raise RuntimeError(f"the load generator ended with code {done.returncode}: {done.stdout[-2000:]}")
        return dict(json.loads(done.stdout))


def main() -> None:
    """Start the server, put the loads on it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL_DIR", help="a model's shapes and tokenizer (with --tiny: demo)")
    parser.add_argument("--loads", type=Load.parse, nargs="+", metavar="RATE:SEED:REQUESTS", help=f"default: {LOADS}")
    parser.add_argument("--server-flags", type=shlex.split, default=[], metavar="FLAGS", help="further flags of the server")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything; loads that do not fit are left out")
    parser.add_argument("--tiny", action="store_true", help="the demo model and short loads, for a machine without a GPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--log", type=Path, help="write the server's log here")
    args = parser.parse_args()
    if args.model is None and not args.tiny:
        parser.error("no model is given")
    model = args.model or "demo"
    loads = args.loads or [Load.parse(text) for text in (TINY_LOADS if args.tiny else LOADS).split()]
    server_flags = (*(TINY_SERVER_FLAGS if args.tiny else SERVER_FLAGS), *args.server_flags)
    client_flags = TINY_CLIENT_FLAGS if args.tiny else CLIENT_FLAGS
    # A signal that ends the script must still stop the server.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        log = args.log or Path(directory, "server.log")
        command = shlex.join(
            [sys.executable, "-c", RUN, "serve", model, "--host", "127.0.0.1", "--port", "{port}", *server_flags]
        )
        try:
            with started_server(command, log, timeout_seconds=args.seconds, ready_path="/ready") as (url, _):
                bench = Bench(url, client_flags, began + args.seconds)
                print(f"the server is ready after {time.monotonic() - began:.0f} s", flush=True)
                is_whole = run(bench, loads, Path(model).name, shlex.join(server_flags), args.json)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:] if log.exists() else "", file=sys.stderr)
            raise
    print(f"{time.monotonic() - began:.0f} s in all")
    if not is_whole:
        sys.exit("not every load was measured")


def run(bench: Bench, loads: list[Load], model: str, server_flags: str, json_path: Path | None) -> bool:
    """Measure as many loads as time allows, and write each result as it comes. Returns whether all were measured."""
    left_out = []
    bench.warm_up()
    for load in loads:
        if load.seconds >= bench.left:
            left_out.append(load)
            continue
        try:
            bench.measure(load)
        except subprocess.TimeoutExpired:
            left_out.append(load)
            continue
        print(" | ".join(bench.results[-1].cells()), flush=True)
        if json_path is not None:
            found = {"model": model, "server_flags": server_flags, "loads": [_plain(result) for result in bench.results]}
            json_path.write_text(json.dumps(found, indent=1))
    num_compiled = bench.results[-1].num_compiled if bench.results else 0
    print(f"\n**{model}**, `{server_flags}`, {num_compiled} programs compiled after warm-up; milliseconds\n")
    print(markdown_table(HEADER, [result.cells() for result in bench.results]), "\n", flush=True)
    for load in left_out:
        print(f"{load.rate:g} requests/s, seed {load.seed}, is left out: there is no time for it", flush=True)
    return not left_out


def _plain(result: Result) -> dict[str, Any]:
    plain = asdict(result)
    return plain | {"load": plain["load"] | {"rate": f"{result.load.rate:g}"}}


if __name__ == "__main__":
    main()
