"""Times collectives between the GPUs of this machine, by the kernels and by XLA as the engine has it (NCCL).

    python scripts/bench_collectives.py                    on all GPUs
    python scripts/bench_collectives.py --devices 2 --only all_reduce_norm --seconds 120
    python scripts/bench_collectives.py --tiny             toy shapes, XLA alone, for a machine without GPUs

A program has 64 calls, each on the result of the one before, with a small kernel between; "nothing" has the small kernels alone.
A time is the median of batches of programs that are launched without waiting, divided by the calls, and the least of them. Each line
of the table of jobs is a process with its own time limit, the most important first.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.measuring.command_line import script_parser

CALLS = 64
PROGRAMS = 10
BATCHES = 7
EPS = 1e-5
NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}
"""Compiler options of the engine's programs (jaxllm/runner/step_programs.py)."""
WAYS = ("1 shot", "2 shots", "xla")
ROWS = (
    (16, 4096),
    (64, 4096),
    (1, 4096),
    (8, 4096),
    (128, 4096),
    (256, 4096),
    (512, 4096),
    (16, 8192),
    (64, 8192),
    (256, 8192),
)
VOCABULARY = 128256


@dataclass(frozen=True)
class Job:
    """One process."""

    op: str
    way: str
    """1 shot or 2 shots of "peer", "peer" where there is one way only, or "xla"."""
    shapes: tuple[tuple[int, int], ...]
    """[tokens, width]; of all_to_all rows and vocabulary, of all_gather the array."""
    dtype: str = "bfloat16"


JOBS = (
    *(Job("all_reduce_norm", way, ROWS) for way in WAYS),
    Job("nothing", "xla", ((16, 4096), (256, 4096))),
    *(Job("all_to_all", way, ((64, VOCABULARY), (16, VOCABULARY)), "float32") for way in ("peer", "xla")),
    *(Job("all_gather", way, ((64, 2),), "float32") for way in ("peer", "xla")),
    *(Job("all_reduce", way, ((16, 4096), (64, 4096), (256, 4096))) for way in WAYS),
    *(Job("all_reduce_norm", way, ((16, 4096), (128, 4096)), "float32") for way in WAYS),
)
TINY_JOBS = (
    Job("all_reduce_norm", "xla", ((4, 64),)),
    Job("all_reduce", "xla", ((4, 64),)),
    Job("all_to_all", "xla", ((8, 64),), "float32"),
    Job("all_gather", "xla", ((4, 2),), "float32"),
    Job("nothing", "xla", ((4, 64),)),
)


def main() -> None:
    """Run the jobs, one after the other, each in its process."""
    args = _arguments()
    jobs = TINY_JOBS if args.tiny else JOBS
    if args.as_job is not None:
        measure(jobs[args.as_job], args)
        return
    until = time.perf_counter() + args.seconds
    for number, job in enumerate(jobs):
        if args.only not in f"{job.op} {job.way} {job.dtype}":
            continue
        left = until - time.perf_counter()
        if left < 10:
            print(f"out of time; not measured: {job.op} {job.way} {job.dtype} and what follows", flush=True)
            break
        command = [sys.executable, __file__, "--as-job", str(number), *(["--tiny"] if args.tiny else [])]
        command += [] if args.devices is None else ["--devices", str(args.devices)]
        limit = min(left, args.limit)
        try:
            status = subprocess.run(command, timeout=limit, env=_environment(args.tiny)).returncode
            if status:
                print(f"{job.op} {job.way} {job.dtype}: ended with status {status}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{job.op} {job.way} {job.dtype}: killed after {limit:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--devices", type=int, help="the first so many; default: all")
    parser.add_argument(
        "--only", default="", help='jobs whose "op way dtype" holds this, as "all_reduce_norm 2 shots bfloat16"'
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="begin nothing after this")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one job")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, XLA alone")
    parser.add_argument("--as-job", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _environment(tiny: bool) -> dict[str, str]:
    """Little memory, so that starting is quick; toy devices where there are none."""
    found = dict(os.environ)
    if tiny:
        return found | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    return found


def measure(job: Job, args: argparse.Namespace) -> None:
    """A line per shape."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from pallas_kernels import collectives
    from scripts.kernels.compiling import first_line

    devices = jax.devices()[: args.devices]
    mesh = Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))
    communicator = None if job.way == "xla" else collectives.Communicator(mesh)
    for shape in job.shapes:
        name = f"{job.op:16} {job.way:8} {len(devices)} devices {shape[0]:4} x {shape[1]:<6} {job.dtype:9}"
        try:
            median, least = _time(job, shape, mesh, communicator, tiny=args.tiny)
            print(f"{name} {median:8.2f} us (least {least:.2f})", flush=True)
        except Exception as problem:
            print(f"{name}   FAILED {first_line(problem)}", flush=True)


def _time(job: Job, shape: tuple[int, int], mesh: Any, communicator: Any, *, tiny: bool) -> tuple[float, float]:
    """Median and least of the microseconds a call. Raises RuntimeError if a wait was given up."""
    import jax

    from pallas_kernels.checking.collectives import mapped, put

    arrays = put(mesh, *_arrays(job, shape, mesh.size))
    program: Any = mapped(mesh, _chain(job, mesh.axis_names[0]), len(arrays))
    workspace = None if communicator is None else communicator.workspace
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    options: dict[str, Any] = dict(NCCL) if on_gpu and job.way == "xla" else {}
    run = program.lower(workspace, *arrays).compile(compiler_options=options)
    if communicator is not None:
        communicator.first_runs(lambda: run(workspace, *arrays))
    for _ in range(1 if tiny else 3):
        jax.block_until_ready(run(workspace, *arrays))
    found = []
    for _ in range(1 if tiny else BATCHES):
        begun = time.perf_counter()
        results = [run(workspace, *arrays) for _ in range(1 if tiny else PROGRAMS)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begun) / len(results) / CALLS * 1e6)
    if communicator is not None and communicator.failed():
        communicator.reset()
        raise RuntimeError("a wait was given up")
    return statistics.median(found), min(found)


def _arrays(job: Job, shape: tuple[int, int], size: int) -> list[Any]:
    """The carry, then what the small kernel and the norm take, each with the devices as first dimension."""
    import jax.numpy as jnp

    from pallas_kernels.checking.host import Normals

    normals = Normals()
    dtype = jnp.dtype(job.dtype)
    if job.op == "all_to_all":
        shape = (size, shape[0] // size * shape[1] // size)
    carry = normals.of(dtype, size, *shape)
    factor = normals.of(dtype, size, shape[1]) / (2 * size)
    return [carry, factor.astype(dtype), normals.of(dtype, size, shape[1])]


def _chain(job: Job, axis: str) -> Callable[..., Any]:
    """CALLS calls of an op on the devices' parts."""
    import jax

    from pallas_kernels import collectives
    from pallas_kernels.collectives import peer

    def step(workspace: Any, h: Any, y: Any, factor: Any, weight: Any) -> tuple[Any, Any]:
        options: dict[str, Any] = {"axis": axis, "workspace": workspace}
        module: Any = collectives
        if "shot" in job.way:
            module, options["num_shots"] = peer, int(job.way[0])
        else:
            options["implementation"] = job.way
        part = y * factor + weight
        if job.op == "all_reduce_norm":
            return module.all_reduce_norm(part, h, weight, EPS, **options)
        if job.op == "nothing":
            return h, part
        result = getattr(module, job.op)(part, **options)
        return h, result[jax.lax.axis_index(axis) - 1] if job.op == "all_gather" else result

    step = jax.jit(step)  # traced once

    def chain(workspace: Any, h: Any, factor: Any, weight: Any) -> tuple[Any, Any]:
        y = h
        for _ in range(CALLS):
            h, y = step(workspace, h, y, factor, weight)
            if job.op == "nothing":
                y = jax.lax.optimization_barrier(y)
        return h, y

    return chain


if __name__ == "__main__":
    main()
