"""Times each kernel, and what could stand in its place, against the limit of this machine's device, and checks what it computed.

    python scripts/bench_kernels.py                        every op at every shape
    python scripts/bench_kernels.py --ops attention --only decode --tune     other tile sizes too; prints the best per shape
    python scripts/bench_kernels.py --tiny                 toy shapes with interpreted kernels, for a machine without a GPU

Calls are chained inside one program, so launches are hidden as they are in a model's step, and their constants rotate over copies
that the cache cannot hold. The limit is the time that a call's bytes take a copy and its operations a large bf16 product in the
same run. A new op is a file in scripts/kernels/.
"""

import argparse
import concurrent.futures
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.measuring.limits import Work, measure_ceilings, median_seconds
from scripts.kernels import OPS, Case, cases
from scripts.kernels.compiling import Compiler, first_line
from scripts.measuring.command_line import script_parser
from scripts.measuring.describe import describe_ceilings

L2_BYTES = 60 << 20
SECONDS_PER_PROGRAM = 4e-3  # long enough to hide the host's part of a program's start


def main() -> None:
    """Measure the asked cases."""
    parser = script_parser(__doc__)
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)}")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--variants", default="", help="variants whose names begin with one of these; default: all")
    parser.add_argument("--tune", action="store_true", help="try candidate tile sizes")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop measuring then; each case gets an equal share")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, one repeat")
    parser.add_argument("--output", default=os.environ.get("OUT", ""), help="folder for bench_kernels.json")
    args = parser.parse_args()
    bench = Bench(args)
    found = [case for _, case in cases("speed", args.ops.split(","), tiny=args.tiny, tune=args.tune) if args.only in case.name]
    bench.measure_all(found)
    if args.output:
        Path(args.output, "bench_kernels.json").write_text(json.dumps(bench.results, indent=1))


class Bench:
    """One run: its measured limits, its time, its results so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.deadline = time.perf_counter() + args.seconds
        self.ceilings = measure_ceilings(tiny=args.tiny)
        print(f"jax {jax.__version__} {jax.devices()[0].device_kind}: {describe_ceilings(self.ceilings)}", flush=True)
        self.compiler = Compiler()
        self.results: list[dict[str, Any]] = []

    def wants(self, label: str) -> bool:
        return any(label.startswith(name) for name in self.args.variants.split(","))

    def measure_all(self, found: list[Case]) -> None:
        """The next case compiles while one is timed."""
        upcoming = self.submit(found[0]) if found else {}
        for index, case in enumerate(found):
            programs, upcoming = upcoming, self.submit(found[index + 1]) if index + 1 < len(found) else {}
            now = time.perf_counter()
            if now > self.deadline:
                print(f"out of time; not measured: {', '.join(case.name for case in found[index:])}", flush=True)
                break
            self.measure(case, programs, deadline=now + (self.deadline - now) / (len(found) - index))
        self.compiler.close()

    def submit(self, case: Case) -> dict[str, concurrent.futures.Future[Any]]:
        """Start to compile a case's variants."""
        try:
            carry, constants = jax.eval_shape(case.make)
        except Exception as problem:
            print(f"  no arrays for {case.name}: {first_line(problem)}", flush=True)
            return {}
        copies = [constants] * self.num_copies(constants)
        unroll, trips = self.num_calls(case)
        return {
            label: self.compiler.submit(chained(call, case.feed, unroll, trips), carry, copies, donate=(0,))
            for label, call in sorted(case.variants.items(), key=lambda item: item[0] == "xla")  # the slow one last
            if self.wants(label)
        }

    def num_copies(self, constants: Any) -> int:
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(constants))
        return 1 if self.args.tiny else min(8, max(1, math.ceil(4 * L2_BYTES / max(1, size))))

    def num_calls(self, case: Case) -> tuple[int, int]:
        if self.args.tiny:
            return 1, 1
        least = max(3e-6, self.limit(case))
        return 8, max(1, min(64, math.ceil(SECONDS_PER_PROGRAM / (8 * least))))

    def limit(self, case: Case) -> float:
        return self.ceilings.seconds(Work(case.bytes, case.flops))

    def measure(self, case: Case, programs: dict[str, concurrent.futures.Future[Any]], deadline: float) -> None:
        """Time the variants in their order, the first one in any case."""
        carry, constants = case.make()
        copies = [constants] + [jax.tree.map(jnp.copy, constants) for _ in range(self.num_copies(constants) - 1)]
        calls = math.prod(self.num_calls(case))
        limit = self.limit(case)
        best: tuple[float, str] | None = None
        for label, future in programs.items():
            if best is not None and time.perf_counter() > deadline:
                future.cancel()
                continue
            try:
                run = Repeated(future.result(timeout=max(20.0, deadline - time.perf_counter())), carry)
                seconds = median_seconds(run, copies, repeats=1 if self.args.tiny else 5) / calls
                run.carry = None
                error = case.error(carry, constants, jax.jit(case.variants[label])(carry, *constants))
                right = error <= case.tolerance
                speed = f"{case.bytes / seconds / 1e9:6.0f} GB/s {case.flops / seconds / 1e12:5.0f} TFLOP/s"
                verdict = f"{limit / seconds:5.0%} of the limit, error {error:.1e}" + ("" if right else " WRONG")
                note = f"; {case.note}" if case.note else ""
                print(f"{case.name:40} {label:30} {seconds * 1e6:9.1f} us {speed} {verdict}{note}", flush=True)
                self.results.append(
                    {"case": case.name, "variant": label, "us": seconds * 1e6, "limit_us": limit * 1e6, "error": error}
                )
                if right and (best is None or seconds < best[0]):
                    best = seconds, label
            except Exception as problem:
                print(f"{case.name:40} {label:30} FAILED {first_line(problem)}", flush=True)
        if best is not None and len(programs) > 1:
            print(f"{case.name:40} best: {best[1]}", flush=True)


class Repeated:
    """A program that gets its own result as the next carry, because its carry is donated."""

    def __init__(self, program: Callable[..., Any], carry: Any):
        self.program = program
        self.carry = jax.tree.map(jnp.copy, carry)

    def __call__(self, copies: Any) -> Any:
        self.carry = self.program(self.carry, copies)
        return self.carry


def chained(call: Callable[..., Any], feed: Callable[[Any, Any], Any], unroll: int, trips: int) -> Callable[..., Any]:
    """unroll * trips calls, each on the result of the one before and on the next of the copies."""
    call = jax.jit(call)  # lowered once

    def run(carry: Any, copies: list[tuple[Any, ...]]) -> Any:
        def body(_: int, carry: Any) -> Any:
            for i in range(unroll):
                carry = feed(carry, call(carry, *copies[i % len(copies)]))
            return carry

        return lax.fori_loop(0, trips, body, carry)

    return run


if __name__ == "__main__":
    main()
