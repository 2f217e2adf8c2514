"""Breaks down the time of a step: the kernels of a trace, divided into products, attention, communication and others."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jaxllm.measuring.trace import Kernel, Trace, class_of
from jaxllm.scaling.results import CPU_THUNKS, GPU_KERNELS, PARTS, Breakdown

NUM_TOP = 12
_PART_OF_CLASS = {"GEMM": "products", "attention": "attention", "communication": "communication"}
_PRECEDENCE = ("products", "attention", "other", "communication")
"""Time in which kernels of several parts run counts for the first of them: communication counts only if nothing hides it."""
_CPU_PRODUCT = re.compile(r"(^|_)(dot|ynn|onednn|gemm|matmul)", re.IGNORECASE)
_CPU_CONTAINER = re.compile(r"(while|call|conditional)(\.\d+)?$")
"""Thunks that only run other thunks."""


def part_of(name: str, source: str) -> str:
    """Which of PARTS a kernel or thunk belongs to, by its name. A CPU's attention cannot be distinguished from the rest."""
    kind = class_of(name)
    if source == CPU_THUNKS and kind != "communication":
        return "products" if _CPU_PRODUCT.search(name) else "other"
    return _PART_OF_CLASS.get(kind, "other")


def break_down(
    trace: Trace, tensor_parallel_size: int, work: str, num_requests: int, *, num_steps: int, step_seconds: float
) -> Breakdown:
    """The breakdown of `num_steps` traced steps of `step_seconds` each without the profiler. Raises ValueError if there is none."""
    on_gpu = bool(trace.kernels)
    source = GPU_KERNELS if on_gpu else CPU_THUNKS
    spans = trace.kernels if on_gpu else [span for span in trace.thunks if not _CPU_CONTAINER.match(span.name)]
    if not spans:
        raise ValueError("the profiler's trace holds nothing of the device")
    part = {name: part_of(name, source) for name in {span.name for span in spans}}
    devices = [[span for span in spans if span.device == device] for device in sorted({span.device for span in spans})]
    times = [time_by_part((span.start, span.end, part[span.name]) for span in its) for its in devices]
    ms_per_step = 1e-3 / num_steps
    busy_ms = {name: sum(its[name] for its, _ in times) / len(devices) * ms_per_step for name in PARTS}
    parts_ms: dict[str, float | None] = {**busy_ms} if on_gpu else {**busy_ms, "attention": None}
    waiting = waiting_time([[span for span in its if part[span.name] == "communication"] for its in devices])
    longest: Counter[str] = Counter()
    for span in devices[0]:
        longest[span.name] += span.end - span.start  # type: ignore[assignment]
    launches = Counter(span.name for span in devices[0])
    return Breakdown(
        tensor_parallel_size,
        work,
        num_requests,
        num_steps,
        source,
        parts_ms=parts_ms,
        hidden_communication_ms=sum(hidden for _, hidden in times) / len(devices) * ms_per_step,
        waiting_ms=waiting * ms_per_step if on_gpu and waiting is not None else None,
        gaps_ms=max(0.0, step_seconds * 1e3 - sum(busy_ms.values())) if on_gpu else None,
        launches=len(spans) / len(devices) / num_steps,
        traced_ms=trace.wall * ms_per_step,
        step_ms=step_seconds * 1e3,
        top=[(name, part[name], time * ms_per_step, launches[name] / num_steps) for name, time in longest.most_common(NUM_TOP)],
    )


def time_by_part(spans: Iterable[tuple[float, float, str]]) -> tuple[Mapping[str, float], float]:
    """The time of one device by part, each moment counted once, and how long communication ran while other kernels did."""
    edges = sorted(edge for start, end, part in spans for edge in ((start, 1, part), (end, -1, part)))
    running: Counter[str] = Counter()
    times = dict.fromkeys(PARTS, 0.0)
    hidden = last = 0.0
    for at, change, part in edges:
        if first := next((name for name in _PRECEDENCE if running[name] > 0), None):
            times[first] += at - last
            if first != "communication" and running["communication"] > 0:
                hidden += at - last
        running[part] += change
        last = at
    return times, hidden


def waiting_time(devices: Sequence[Sequence[Kernel]]) -> float | None:
    """Time of the communication that is waiting for the last device, mean over the devices.

    A collective's kernel runs from when its device is ready until all have finished, so the shortest of the matching ones
    waited least. None for a single device, or if the devices have different numbers of kernels.
    """
    if len(devices) < 2 or len({len(kernels) for kernels in devices}) > 1:
        return None
    lengths = [[kernel.end - kernel.start for kernel in together] for together in zip(*devices, strict=True)]
    return sum(sum(each) / len(each) - min(each) for each in lengths)
