"""Reads a profiler's trace: which kernels ran in a stretch of time, and when the device was idle.

A GPU is a process "/device:GPU:0" of the trace whose threads "Stream #…" hold the device's work; its other threads
("XLA Ops", "XLA Modules") repeat the same time under other names. Copies between host and device run beside the kernels
and do not count as kernels. A CPU has no such process: the thunks that XLA ran there are events of the host's threads
that name an operation of the program and a device. Times are microseconds.
"""

import contextlib
import gzip
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Key = TypeVar("Key")
STRETCH = "measured stretch"
"""Name of the host's annotation that marks the stretch."""

CLASSES = (
    (
        "communication",
        r"nccl|all[-_]?reduce|all[-_]?gather|all[-_]?to[-_]?all|reduce[-_]?scatter|collective|multimem|\bp(sum|max|min|permute)",
    ),
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
    def devices(self) -> list[str]:
        return sorted({kernel.device for kernel in self.kernels})

    @property
    def wall(self) -> float:
        return self.end - self.start

    def busy(self) -> float:
        """Time in which a kernel ran, mean over the devices."""
        if not self.kernels:
            return 0.0
        spans = [[(k.start, k.end) for k in self.kernels if k.device == device] for device in self.devices]
        return sum(end - start for span in spans for start, end in merged(span)) / len(spans)

    def idle_share(self) -> float:
        """Share of the stretch in which the device ran no kernel."""
        return 1 - self.busy() / self.wall


@dataclass
class Recording:
    """Filled when the `record` it comes from ends."""

    trace: Trace | None = field(default=None)


@contextlib.contextmanager
def record() -> Iterator[tuple[Recording, Any]]:
    """Trace what runs inside. Gives the recording, and a context that marks the stretch in it:

    with record() as (recording, stretch):
        come_to_speed()  # starting the profiler lets the device run dry
        with stretch:
            work()
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the host and leave the device idle
    options.host_tracer_level = 1
    recording = Recording()
    with tempfile.TemporaryDirectory() as directory:
        jax.profiler.start_trace(directory, profiler_options=options)
        try:
            yield recording, _marked()
        finally:
            jax.profiler.stop_trace()
        recording.trace = read_trace(Path(directory))


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """JAX's own annotation begins when it is created, not when it is entered."""
    import jax

    with jax.profiler.TraceAnnotation(STRETCH):
        yield


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
    kernels: list[Kernel] = []
    transfers: list[Kernel] = []
    thunks: list[Kernel] = []
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
    for spans in (kernels, thunks):
        spans.sort(key=lambda span: (span.start, span.end))
    return Trace(start, end, kernels, transfers, thunks)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans as spans that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def class_of(name: str) -> str:
    """Which of CLASSES a kernel belongs to."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def most(times: Mapping[Key, float]) -> list[tuple[Key, float]]:
    """The longest first."""
    return sorted(times.items(), key=lambda item: -item[1])
