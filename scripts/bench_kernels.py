"""Checks and times the paged attention kernels on this machine's accelerator, against the bandwidth of a copy in the same run.

    python scripts/bench_kernels.py                  every shape with its default tile sizes
    python scripts/bench_kernels.py --tune           tries candidate tile sizes too and prints the best per shape
    python scripts/bench_kernels.py --tiny           toy shapes with interpreted kernels, for a machine without a GPU

Times are of calls chained through the queries inside one program, so launches are hidden as they are in a model's step.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cache_write import write_cache
from pallas_kernels.paged_attention import reference, triton_decode, triton_prefill, xla

L2_BYTES = 50 << 20


@dataclass(frozen=True)
class Case:
    """A batch: num_decodes rows of one query, and prompts (number of new tokens, keys before them)."""

    name: str
    decodes: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    padding: int = 0

    @property
    def query_lengths(self) -> list[int]:
        return [1] * len(self.decodes) + [new for new, _ in self.prompts]

    @property
    def kv_lengths(self) -> list[int]:
        return list(self.decodes) + [new + before for new, before in self.prompts]

    def flops(self) -> float:
        pairs = 0
        for new, length in zip(self.query_lengths, self.kv_lengths, strict=True):
            seen = np.arange(length - new, length) + 1
            pairs += int(np.minimum(seen, self.window or length).sum())
        return 4.0 * pairs * self.head_dim * self.num_kv_heads * self.num_groups

    def bytes(self) -> float:
        keys = sum(min(n, self.window or n) for n in self.kv_lengths)
        return 2.0 * keys * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


SPEED_DECODE = [
    Case(f"decode {rows}x{length} h{dim}", decodes=(length,) * rows, head_dim=dim)
    for dim in (128, 64)
    for rows, length in ((1, 8192), (16, 4096), (64, 2048), (256, 1024))
]
SPEED_PREFILL = [
    Case("prefill 1x8192", prompts=((8192, 0),)),
    Case("prefill 8x1024", prompts=((1024, 0),) * 8),
    Case("prefill 16x512 + 64 decodes of 1024", decodes=(1024,) * 64, prompts=((512, 0),) * 16),
    Case("prefill 1x8192 h64", prompts=((8192, 0),), head_dim=64),
    Case("prefill 8x1024 h64", prompts=((1024, 0),) * 8, head_dim=64),
]
CHECKS = [
    Case("mixed", decodes=(1, 300, 77), prompts=((7, 0), (130, 0), (33, 200), (64, 64)), padding=13),
    Case("window", decodes=(300,), prompts=((130, 40),), window=50),
    Case("window long", decodes=(1500,), prompts=((700, 600),), window=256),
    Case("soft cap", decodes=(300,), prompts=((130, 40),), soft_cap=30.0),
    Case("h64 g1", decodes=(300,), prompts=((130, 40),), head_dim=64, num_groups=1),
    Case("h80 g3", decodes=(300,), prompts=((130, 40),), head_dim=80, num_groups=3),
    Case("h96 g5", decodes=(300,), prompts=((130, 40),), head_dim=96, num_groups=5),
    Case("h256 g8", decodes=(300,), prompts=((130, 40),), head_dim=256, num_groups=8),
    Case("h128 g16", decodes=(300,), prompts=((130, 40),), num_groups=16),
    Case("float32", decodes=(300,), prompts=((130, 40),), dtype="float32"),
    Case("float32 h64", decodes=(300,), prompts=((130, 40),), dtype="float32", head_dim=64, num_groups=2),
    Case("float16 page 64", decodes=(300,), prompts=((130, 40),), dtype="float16", page_size=64),
    Case("page 8", decodes=(300,), prompts=((130, 40),), page_size=8),
    Case("page 128", decodes=(300,), prompts=((130, 40),), page_size=128),
]
TINY = [
    Case("tiny decode", decodes=(70, 33), head_dim=16, num_kv_heads=2, num_groups=2, page_size=8, dtype="float32"),
    Case("tiny mixed", decodes=(9,), prompts=((21, 5),), head_dim=16, num_kv_heads=2, num_groups=2, page_size=8, padding=3),
]


def make_arrays(case: Case, seed: int = 0) -> dict[str, jax.Array]:
    """Random queries and keys in permuted pages; every slot that a row does not own is NaN in small cases."""
    rng = np.random.default_rng(seed)
    num_rows = len(case.kv_lengths)
    width = max(-(-n // case.page_size) for n in case.kv_lengths)
    num_pages = num_rows * width + 1
    table = (rng.permutation(num_pages - 1) + 1).astype(np.int32).reshape(num_rows, width)
    num_tokens = sum(case.query_lengths) + case.padding
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    dtype = jnp.dtype(case.dtype)
    keys = jax.random.split(jax.random.key(seed), 3)
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, dtype), static_argnums=1)
    k, v = normal(keys[0], shape), normal(keys[1], shape)
    if math.prod(shape) < 1 << 24:
        owned = np.zeros((num_pages, case.page_size), bool)
        for row, length in enumerate(case.kv_lengths):
            slots = np.arange(length)
            owned[table[row, slots // case.page_size], slots % case.page_size] = True
        hole = jnp.asarray(~owned)[:, None, :, None]
        k, v = jnp.where(hole, jnp.nan, k).astype(dtype), jnp.where(hole, jnp.nan, v).astype(dtype)
    return {
        "q": normal(keys[2], (num_tokens, case.num_kv_heads, case.num_groups, case.head_dim)),
        "k": k,
        "v": v,
        "table": jnp.asarray(table),
        "query_start": jnp.asarray(np.concatenate([[0], np.cumsum(case.query_lengths)]).astype(np.int32)),
        "kv_length": jnp.asarray(np.array(case.kv_lengths, np.int32)),
    }


def caller(case: Case, implementation: str, tiles: Any, interpret: bool) -> Callable[..., jax.Array]:
    """The function of the arrays that runs the case: a decode if it has no prompts, else ragged attention."""
    options: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    modules: dict[str, Any] = {"xla": xla, "reference": reference}
    if implementation == "triton":
        module: Any = triton_prefill if case.prompts else triton_decode
        options |= {"interpret": interpret, "tiles": tiles}
    else:
        module = modules[implementation]

    def call(q, k, v, table, query_start, kv_length):
        if case.prompts:
            return module.paged_attention(q, k, v, table, query_start, kv_length, **options)
        return module.paged_decode(q, k, v, table, kv_length, **options)

    return call


def relative_error(case: Case, arrays: dict[str, jax.Array], got: jax.Array, num_checked: int = 24) -> float:
    """Against the reference in float32, at some tokens of each kind: a token of a prompt is a decode at its position."""
    rows = np.repeat(np.arange(len(case.kv_lengths)), case.query_lengths)
    start = np.concatenate([[0], np.cumsum(case.query_lengths)])
    tokens = np.arange(len(rows))
    lengths = np.array(case.kv_lengths)[rows] - start[rows + 1] + tokens + 1
    if len(tokens) > num_checked:
        tokens = np.unique(np.linspace(0, len(rows) - 1, num_checked).astype(int))
    expected = jax.jit(
        functools.partial(reference.paged_decode, scale=case.head_dim**-0.5, window=case.window, soft_cap=case.soft_cap)
    )(
        arrays["q"][tokens].astype(jnp.float32),
        arrays["k"],
        arrays["v"],
        arrays["table"][rows[tokens]],
        jnp.asarray(lengths[tokens], jnp.int32),
    )
    difference = got[tokens].astype(jnp.float32) - expected
    if not bool(jnp.isfinite(got).all()):
        return math.nan
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))


def chained(call: Callable[..., jax.Array], unroll: int, trips: int) -> Callable[..., jax.Array]:
    """unroll * trips calls, each on the next of several caches, so that keys come from memory and not from L2."""

    def run(q, caches, table, query_start, kv_length):
        def body(_, q):
            for i in range(unroll):
                q = call(q, *caches[i % len(caches)], table, query_start, kv_length)
            return q

        return lax.fori_loop(0, trips, body, q)

    return run


def median_seconds(run: Callable[..., Any], *args: Any, repeats: int) -> float:
    for _ in range(3):
        jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def candidates(case: Case, tune: bool) -> list[Any]:
    dtype = jnp.dtype(case.dtype)
    width = max(-(-n // case.page_size) for n in case.kv_lengths) * case.page_size
    num_tokens = sum(case.query_lengths) + case.padding
    found: list[Any]
    if case.prompts:
        base: Any = triton_prefill.pick_tiles(num_tokens, case.num_groups, case.head_dim, dtype.itemsize)
        found = [base]
        if tune:
            for m, k, warps in (
                (128, 64, 8),
                (128, 64, 4),
                (64, 64, 4),
                (128, 128, 8),
                (64, 128, 4),
                (128, 32, 8),
                (256, 64, 8),
            ):
                found += [replace(base, block_m=m, block_k=k, num_warps=warps, num_stages=stages) for stages in (2, 3, 5)]
    else:
        rows = len(case.decodes)
        base = triton_decode.pick_tiles(rows, case.num_kv_heads, case.head_dim, dtype.itemsize, width, case.window)
        found = [base]
        if tune:
            splits = sorted({base.num_splits, max(1, base.num_splits // 2), base.num_splits * 2, base.num_splits * 4})
            for block_k, warps, stages in (
                *((32, 4, 7), (64, 4, 3), (64, 4, 5), (64, 4, 7), (128, 4, 3), (128, 4, 5)),
                *((64, 2, 5), (32, 2, 5), (32, 2, 7), (32, 1, 5), (64, 8, 5), (128, 8, 5)),
            ):
                found += [replace(base, block_k=block_k, num_warps=warps, num_stages=stages, num_splits=s) for s in splits]
    return list(dict.fromkeys(found))


class Bench:
    """One run: what it found so far, the threads that compile, and the time it may take."""

    def __init__(self, implementations: list[str], *, tune: bool, interpret: bool, budget: float):
        self.implementations = implementations
        self.tune = tune
        self.interpret = interpret
        self.deadline = time.perf_counter() + budget
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 2))
        self.copy = math.nan
        """GB/s, read and written."""
        self.results: list[dict[str, Any]] = []

    def compile_all(self, jobs: list[tuple[Callable[..., Any], dict[str, jax.Array]]]) -> list[concurrent.futures.Future]:
        """Lowered one after the other, compiled side by side."""

        def submit(function: Callable[..., Any], arrays: dict[str, jax.Array]) -> concurrent.futures.Future:
            try:
                return self.pool.submit(jax.jit(function).lower(*arrays.values()).compile)
            except Exception as error:
                failed: concurrent.futures.Future = concurrent.futures.Future()
                failed.set_exception(error)
                return failed

        return [submit(*job) for job in jobs]

    def check(self, cases: list[Case]) -> None:
        """Each case as attention, and its single tokens as a decode."""
        print("\ncorrectness, relative error (wrong above 1e-2, float32 1e-5)", flush=True)
        jobs, labels = [], []
        for case in cases:
            for one in (case, replace(case, prompts=(), padding=0)):
                arrays = make_arrays(one)
                jobs.append((caller(one, "triton", None, self.interpret), arrays))
                labels.append((one, arrays))
        for (case, arrays), future in zip(labels, self.compile_all(jobs), strict=True):
            kind = "attention" if case.prompts else "decode"
            try:
                error = relative_error(case, arrays, future.result()(*arrays.values()), num_checked=300)
                limit = 1e-5 if case.dtype == "float32" else 1e-2
                print(f"  {'ok   ' if error < limit else 'WRONG'} {kind:10} {case.name:20} {error:.1e}", flush=True)
                self.results.append({"check": case.name, "kind": kind, "error": error})
            except Exception as problem:
                print(f"  FAIL  {kind:10} {case.name:20} {type(problem).__name__}: {str(problem)[:300]}", flush=True)

    def measure_copy(self) -> None:
        num_bytes = 1 << (20 if self.interpret else 31)
        num_copies = 8  # enough that the host's part of a program's start does not show
        x = jnp.zeros((num_bytes // 4,), jnp.float32)
        copies = jax.jit(lambda x: lax.fori_loop(0, num_copies, lambda _, x: x + 1, x))
        self.copy = 2 * num_bytes * num_copies / median_seconds(copies, x, repeats=10) / 1e9
        print(f"\ncopy {self.copy:.0f} GB/s", flush=True)

    def measure_all(self, cases: list[Case]) -> None:
        """Each case gets an equal share of the time that is left."""
        for index, case in enumerate(cases):
            now = time.perf_counter()
            if now > self.deadline:
                print("out of time; the remaining shapes are not measured", flush=True)
                break
            self.measure(case, deadline=now + (self.deadline - now) / (len(cases) - index))

    def measure(self, case: Case, deadline: float) -> None:
        """Time a case with its default tiles, and the candidates for which there is time."""
        arrays = make_arrays(case)
        # Enough calls that the host's part of a program's start does not show.
        unroll, trips = (1, 1) if self.interpret else (8, 8 if case.bytes() < 1e9 and case.flops() < 1e11 else 2)
        plans = [("triton", tiles) for tiles in candidates(case, self.tune)] if "triton" in self.implementations else []
        if "xla" in self.implementations:
            plans.append(("xla", None))
        num_caches = 1 if self.interpret else min(unroll, max(1, math.ceil(L2_BYTES * 4 / case.bytes())))
        caches = [(arrays["k"], arrays["v"])]
        caches += [(arrays["k"] + 0, arrays["v"] + 0) for _ in range(num_caches - 1)]
        loop_arrays = {"q": arrays["q"], "caches": caches} | {
            name: arrays[name] for name in ("table", "query_start", "kv_length")
        }
        jobs = [(chained(caller(case, name, tiles, self.interpret), unroll, trips), loop_arrays) for name, tiles in plans]
        rows = []
        for (name, tiles), run in zip(plans, self.compile_all(jobs), strict=True):
            if time.perf_counter() > deadline and rows:
                run.cancel()
                continue
            label = f"{name} " + " ".join(f"{key}={value}" for key, value in asdict(tiles).items()) if tiles else name
            try:
                program = run.result(timeout=max(20.0, deadline - time.perf_counter()))
                repeats = 1 if self.interpret else 5
                seconds = median_seconds(program, *loop_arrays.values(), repeats=repeats) / (unroll * trips)
                rows.append((seconds, label, name, tiles))
            except Exception as problem:
                print(f"  skipped {case.name}, {label}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        shown = rows[:1] + [row for row in sorted(rows, key=lambda row: row[0])[:4] if row is not rows[0]]
        for seconds, label, name, tiles in shown:
            try:
                error = relative_error(case, arrays, jax.jit(caller(case, name, tiles, self.interpret))(*arrays.values()))
            except Exception as problem:
                print(f"  no check of {label}: {str(problem)[:200]}", flush=True)
                error = math.nan
            mark = "default" if label == rows[0][1] else "       "
            self.report(case, label, seconds, error, mark)

    def report(self, case: Case, label: str, seconds: float, error: float, mark: str) -> None:
        gigabytes, teraflops = case.bytes() / seconds / 1e9, case.flops() / seconds / 1e12
        speed = f"{teraflops:6.1f} TFLOP/s" if case.prompts else f"{gigabytes:6.0f} GB/s = {gigabytes / self.copy:.2f} of copy"
        print(f"{case.name:36} {seconds * 1e6:9.1f} us {speed}  error {error:.1e}  {mark} {label}", flush=True)
        self.results.append(
            {"case": case.name, "label": label, "seconds": seconds, "GB/s": gigabytes, "TFLOP/s": teraflops, "error": error}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try candidate tile sizes")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, interpreted kernels")
    parser.add_argument("--only", default="", help="run the cases whose name contains this; 'check' for the small checks")
    parser.add_argument("--implementations", default="triton", help="comma-separated: triton, xla")
    parser.add_argument("--budget", type=float, default=170.0, help="start nothing new after this many seconds")
    parser.add_argument("--output", default=os.environ.get("OUT", ""), help="folder for bench_kernels.json")
    args = parser.parse_args()
    print(f"jax {jax.__version__} {jax.devices()[0].device_kind}", flush=True)
    interpret = args.tiny or jax.default_backend() != "gpu"
    bench = Bench(args.implementations.split(","), tune=args.tune, interpret=interpret, budget=args.budget)
    checks = [case for case in CHECKS if not args.tiny and (args.only in ("", "check") or args.only in case.name)]
    if checks:
        bench.check(checks)
    bench.measure_copy()
    bench.measure_all([case for case in (TINY if args.tiny else SPEED_DECODE + SPEED_PREFILL) if args.only in case.name])
    if args.only in "write":
        bench.results += bench_write(interpret)
    if args.output:
        found = {"copy_GB/s": bench.copy, "results": bench.results}
        Path(args.output, "bench_kernels.json").write_text(json.dumps(found, indent=1))
    bench.pool.shutdown(wait=False, cancel_futures=True)


def bench_write(interpret: bool) -> list[dict[str, Any]]:
    """Both cache writers at a decode's and a prefill's number of tokens."""
    found = []
    num_pages, num_kv_heads, page_size, head_dim = (64, 2, 8, 16) if interpret else (8192, 8, 16, 128)
    for num_tokens in (16,) if interpret else (64, 8192):
        for implementation in ("xla", "triton"):
            unroll, trips = (1, 1) if interpret else (8, 8)
            x = jnp.ones((num_tokens, num_kv_heads, head_dim), jnp.bfloat16)
            slot = jnp.asarray(np.random.default_rng(0).permutation(num_pages * page_size)[:num_tokens].astype(np.int32))
            shape = (num_pages, num_kv_heads, page_size, head_dim)

            def run(k, v, x, slot, implementation=implementation, unroll=unroll, trips=trips):
                def body(_, caches):
                    for _ in range(unroll):
                        caches = write_cache(*caches, x, x, slot, implementation=implementation, interpret=interpret)
                    return caches

                return lax.fori_loop(0, trips, body, (k, v))

            try:
                program = jax.jit(run, donate_argnums=(0, 1))
                k, v = jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)
                times = []
                for _ in range(6):
                    start = time.perf_counter()
                    k, v = jax.block_until_ready(program(k, v, x, slot))
                    times.append(time.perf_counter() - start)
                seconds = float(np.median(times[1:])) / (unroll * trips)
                print(f"write {num_tokens:5} tokens, {implementation:8} {seconds * 1e6:8.1f} us", flush=True)
                found.append({"case": f"write {num_tokens}", "label": implementation, "seconds": seconds})
            except Exception as problem:
                print(
                    f"  skipped write {num_tokens} {implementation}: {type(problem).__name__}: {str(problem)[:300]}", flush=True
                )
    return found


if __name__ == "__main__":
    main()
