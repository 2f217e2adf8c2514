"""Reads a profiler's trace: which kernels ran in a stretch of time, and when the device was idle.

A GPU is a process "/device:GPU:0" of the trace whose threads "Stream #…" hold the device's work; its other threads
("XLA Ops", "XLA Modules") repeat the same time under other names. Copies between host and device run beside the kernels
and do not count as kernels. A CPU has no such process: the thunks that XLA ran there are events of the host's threads
that name an operation of the program and a device. Times are microseconds.
"""

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
STRETCH = "measured stretch"
"""Name of the host's annotation that marks the stretch."""

_COLLECTIVES = r"nccl|all[-_]?reduce|all[-_]?gather|all[-_]?to[-_]?all|reduce[-_]?scatter|collective|multimem"
CLASSES = (
    ("communication", _COLLECTIVES + r"|\bp(sum|max|min|permute)"),
    ("attention", r"attention|paged|decode_combine|prefill|flash|fmha"),
    ("cache write, rope", r"write_cache|cache_write|rope"),
    ("sampling", r"argmax|sample|gumbel|top_?k|logprob|threshold|sort"),
    ("GEMM", r"gemm|cublas|nvjet|cutlass|matmul|norm_gate_up|xmma|sm\d+_|split_?k|_dot|wgmma|gemv"),
)
"""Kernels by what their name holds, the first that fits; all others are `other` (what XLA fuses around them)."""

COMMAND_BUFFERS_WHILE_PROFILING = "--xla_enable_command_buffers_during_profiling=true"
"""For XLA_FLAGS, before JAX starts. Without it a profile runs kernel by kernel, with gaps that are not there in service."""


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    name: str
    start: float
    end: float
    device: str


@dataclass(frozen=True)
class Trace:
    """The kernels of one stretch, cut to it, by start; transfers between host and device are separate."""

    start: float
    end: float
    kernels: list[Kernel]
    transfers: list[Kernel]
    thunks: list[Kernel] = field(default_factory=list)
    """What XLA ran on CPU devices."""

    @property
    def wall(self) -> float:
        return self.end - self.start


def record(begin: Callable[[], Any], work: Callable[[], T]) -> tuple[Trace, T]:
    """Trace `work`, and give its result too. `begin` comes before: starting the profiler lets the device run dry."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the host and leave the device idle
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            begin()
            with jax.profiler.TraceAnnotation(STRETCH):
                result = work()
        return read_trace(Path(directory)), result


def read_trace(directory: Path) -> Trace:
    """The one trace under a directory. Raises ValueError if the stretch is not marked in it."""
    paths = sorted(directory.rglob("*.trace.json.gz"))
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} traces under {directory}, there should be one")
    return parse(json.loads(gzip.decompress(paths[0].read_bytes()))["traceEvents"])


def parse(events: Iterable[dict[str, Any]]) -> Trace:
    """The trace in the form of Chrome's trace events."""
    events = list(events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    marks = [e for e in events if e.get("ph") == "X" and e.get("name") == STRETCH]
    if not marks:
        raise ValueError("the trace does not hold the measured stretch; it may have been cut off for its size")
    start = min(e["ts"] for e in marks)
    end = max(e["ts"] + e["dur"] for e in marks)
    kernels, transfers, thunks = spans = [], [], []  # type: tuple[list[Kernel], list[Kernel], list[Kernel]]
    for event in events:
        if event.get("ph") != "X":
            continue
        first, last = max(start, event["ts"]), min(end, event["ts"] + event.get("dur", 0.0))
        if first >= last:
            continue
        process = processes.get(event["pid"], "")
        if "GPU" in process and "Stream" in threads.get((event["pid"], event["tid"]), ""):
            is_transfer = re.match(r"Memcpy(H2D|D2H)", event["name"]) is not None
            (transfers if is_transfer else kernels).append(Kernel(event["name"], first, last, process))
        elif "GPU" not in process and "hlo_op" in (about := event.get("args") or {}):
            thunks.append(Kernel(event["name"], first, last, f"CPU:{about.get('device_ordinal', 0)}"))
    return Trace(start, end, *(sorted(found, key=lambda span: (span.start, span.end)) for found in spans))


def class_of(name: str) -> str:
    """Which of CLASSES a kernel belongs to."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")
