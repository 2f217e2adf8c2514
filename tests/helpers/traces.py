"""A profiler's trace in Chrome's format: kernels of two GPUs, and work on the host."""

from jaxllm.measuring.trace import STRETCH

GPU, OTHER_GPU, HOST = 1, 2, 700
COMPUTE, SECOND, OPS = 13, 14, 15


def meta(pid: int, name: str, tid: int | None = None) -> dict:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}} | ({} if tid is None else {"tid": tid})


def span(pid: int, tid: int, name: str, start: float, end: float) -> dict:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": end - start}


NAMES = [
    meta(GPU, "/device:GPU:0"),
    meta(OTHER_GPU, "/device:GPU:1"),
    meta(HOST, "/host:CPU"),
    meta(GPU, "Stream #13(Compute)", COMPUTE),
    meta(GPU, "Stream #14(Compute,MemcpyD2H)", SECOND),
    meta(GPU, "XLA Ops", OPS),
    meta(OTHER_GPU, "Stream #13(Compute)", COMPUTE),
    meta(HOST, "python", 9),
]
EVENTS = [
    *NAMES,
    span(HOST, 9, STRETCH, 100.0, 200.0),
    span(HOST, 9, "something else on the host", 0.0, 900.0),
    span(GPU, COMPUTE, "early", 50.0, 90.0),
    span(GPU, COMPUTE, "gemm_fusion_dot_7", 95.0, 110.0),  # cut at 100
    span(GPU, COMPUTE, "paged_decode", 120.0, 140.0),
    span(GPU, SECOND, "loop_add_fusion", 130.0, 150.0),  # overlaps on another stream
    span(GPU, SECOND, "MemcpyD2H", 150.0, 175.0),  # no kernel
    span(GPU, OPS, "paged_decode", 120.0, 180.0),  # the same time under another name
    span(GPU, COMPUTE, "paged_decode", 180.0, 230.0),  # cut at 200
]
