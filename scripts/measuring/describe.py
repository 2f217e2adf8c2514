"""Describes in text a device's limits, and a trace of decode steps: kernels by time and kind, and the gaps between them."""

import collections
from collections.abc import Iterable

from jaxllm.measuring.limits import Ceilings
from jaxllm.measuring.trace import Kernel, Trace, class_of
from scripts.measuring.idle import busy, devices, idle_share

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def describe_ceilings(found: Ceilings) -> str:
    """`copy 3.90 TB/s, bf16 GEMM 680 TFLOP/s`"""
    dtype = _SHORT.get(found.gemm_dtype, found.gemm_dtype)
    copy, gemm = found.copy_bytes_per_second / 1e12, found.gemm_flops_per_second / 1e12
    return f"copy {copy:.2f} TB/s, {dtype} GEMM {gemm:.0f} TFLOP/s"


def gaps(kernels: Iterable[Kernel]) -> list[tuple[str, str, float]]:
    """The pauses of one device: (kernel that ended last before it, kernel that ends it, length)."""
    found = []
    last: Kernel | None = None
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start, kernel.end)):
        if last is not None and kernel.start > last.end:
            found.append((last.name, kernel.name, kernel.start - last.end))
        if last is None or kernel.end > last.end:
            last = kernel
    return found


def describe(trace: Trace, *, num_steps: int, num_layers: int, top: int = 20) -> str:
    """Time of each step: busy and idle, classes, kernels, gaps by neighbours (first device)."""
    if not trace.kernels:
        return "  the trace holds no GPU kernels"
    first = devices(trace)[0]
    kernels = [kernel for kernel in trace.kernels if kernel.device == first]
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    by_class: collections.Counter[str] = collections.Counter()
    for kernel in kernels:
        total[kernel.name] += kernel.end - kernel.start
        count[kernel.name] += 1
        by_class[class_of(kernel.name)] += kernel.end - kernel.start
    pauses: collections.Counter[tuple[str, str]] = collections.Counter()
    num_pauses: collections.Counter[tuple[str, str]] = collections.Counter()
    for before, after, length in gaps(kernels):
        pauses[before, after] += length
        num_pauses[before, after] += 1
    in_kernels = sum(total.values())
    launches = len(kernels) / num_steps
    moved = sum(transfer.end - transfer.start for transfer in trace.transfers)
    lines = [
        f"  per step: wall {trace.wall / num_steps:.0f} us, a kernel running {busy(trace) / num_steps:.0f}, "
        f"none {(trace.wall - busy(trace)) / num_steps:.0f} ({idle_share(trace):.1%}); sum of kernels {in_kernels / num_steps:.0f} in "
        f"{launches:.1f} launches, {launches / num_layers:.1f} a layer; transfers {moved / num_steps:.0f}",
        "  " + ", ".join(f"{kind} {time / in_kernels:.1%}" for kind, time in by_class.most_common()),
    ]
    for name, time in total.most_common(top):
        lines.append(f"  {time / num_steps:9.1f} us x{count[name] / num_steps:6.1f}  {class_of(name):18} {name[:100]}")
    lines.append(
        f"  gaps between kernels: {sum(pauses.values()) / num_steps:.1f} us in {sum(num_pauses.values()) / num_steps:.1f}"
    )
    for (before, after), length in pauses.most_common(max(1, top // 2)):
        times = num_pauses[before, after]
        lines.append(f"  {length / num_steps:9.1f} us x{times / num_steps:6.1f}  {before[:50]} -> {after[:50]}")
    return "\n".join(lines)
