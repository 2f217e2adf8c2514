"""Breaks down the time of a step: the kernels of a trace, divided into products, attention, communication and others."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxllm.scaling.rows import CPU_THUNKS, GPU_KERNELS, PARTS, Breakdown
from jaxllm.scaling.trace import Kernel, Trace, class_of

NUM_TOP = 12
_PART_OF_CLASS = {"GEMM": "products", "attention": "attention", "communication": "communication"}
_PRECEDENCE = ("products", "attention", "other", "communication")
"""Time in which kernels of several parts run counts for the first of them: communication counts only if nothing hides it."""
_CPU_PRODUCT = re.compile(r"(^|_)(dot|ynn|onednn|gemm|matmul)", re.IGNORECASE)
_CPU_CONTAINER = re.compile(r"(while|call|conditional)(\.\d+)?$")
"""Thunks that only run other thunks."""


def part_of(name: str) -> str:
    """Which of PARTS a GPU's kernel belongs to, by its name."""
    return _PART_OF_CLASS.get(class_of(name), "other")


def part_of_thunk(name: str) -> str:
    """Which part of a step XLA's work on a CPU belongs to; attention cannot be distinguished from the rest."""
    if class_of(name) == "communication":
        return "communication"
    return "products" if _CPU_PRODUCT.search(name) else "other"


def break_down(
    trace: Trace, *, tensor_parallel_size: int, work: str, num_requests: int, num_steps: int, step_seconds: float
) -> Breakdown | None:
    """The breakdown of `num_steps` traced steps of `step_seconds` each without the profiler. None for an empty trace."""
    on_gpu = bool(trace.kernels)
    spans = trace.kernels if on_gpu else [span for span in trace.thunks if not _CPU_CONTAINER.match(span.name)]
    if not spans:
        return None
    name_part = part_of if on_gpu else part_of_thunk
    by_device = [[span for span in spans if span.device == device] for device in sorted({span.device for span in spans})]
    devices = [time_by_part((span.start, span.end, name_part(span.name)) for span in its) for its in by_device]
    per_step = 1e-3 / len(devices) / num_steps
    parts: dict[str, float | None] = {part: sum(times[part] for times, _ in devices) * per_step for part in PARTS}
    busy = sum(sum(times.values()) for times, _ in devices) * per_step
    if not on_gpu:
        parts["attention"] = None
    waiting = waiting_time([[s for s in its if name_part(s.name) == "communication"] for its in by_device]) if on_gpu else None
    return Breakdown(
        tensor_parallel_size=tensor_parallel_size,
        work=work,
        num_requests=num_requests,
        num_steps=num_steps,
        source=GPU_KERNELS if on_gpu else CPU_THUNKS,
        parts_ms=parts,
        hidden_communication_ms=sum(hidden for _, hidden in devices) * per_step,
        waiting_ms=None if waiting is None else waiting * 1e-3 / num_steps,
        gaps_ms=max(0.0, step_seconds * 1e3 - busy) if on_gpu else None,
        launches=len(spans) / len(devices) / num_steps,
        traced_ms=trace.wall * 1e-3 / num_steps,
        step_ms=step_seconds * 1e3,
        top=_longest(by_device[0], name_part, num_steps),
    )


def time_by_part(spans: Iterable[tuple[float, float, str]]) -> tuple[Mapping[str, float], float]:
    """The time of one device by part, each moment counted once, and how long communication ran while other kernels did."""
    edges = sorted(edge for start, end, part in spans for edge in ((start, 1, part), (end, -1, part)))
    running: Counter[str] = Counter()
    times = dict.fromkeys(PARTS, 0.0)
    hidden, last = 0.0, 0.0
    for at, change, part in edges:
        length = at - last
        first = next((name for name in _PRECEDENCE if running[name] > 0), None)
        if first is not None and length > 0:
            times[first] += length
            if first != "communication" and running["communication"] > 0:
                hidden += length
        running[part] += change
        last = at
    return times, hidden


def waiting_time(devices: Sequence[Sequence[Kernel]]) -> float | None:
    """Fraction of the communication that is waiting for the last device, mean over the devices.

    A collective's kernel runs from when its device is ready until all have finished, so the shortest of the matching ones
    waited least. None for a single device, or if the devices have different numbers of kernels.
    """
    if len(devices) < 2 or len({len(kernels) for kernels in devices}) > 1:
        return None
    waited = 0.0
    for together in zip(*devices, strict=True):
        lengths = [kernel.end - kernel.start for kernel in together]
        waited += sum(lengths) / len(lengths) - min(lengths)
    return waited


def _longest(kernels: Sequence[Kernel], name_part: Callable[[str], str], num_steps: int) -> list[list[Any]]:
    total: Counter[str] = Counter()
    for kernel in kernels:
        total[kernel.name] += kernel.end - kernel.start  # type: ignore[assignment]
    count = Counter(kernel.name for kernel in kernels)
    return [
        [name, name_part(name), time * 1e-3 / num_steps, count[name] / num_steps] for name, time in total.most_common(NUM_TOP)
    ]
