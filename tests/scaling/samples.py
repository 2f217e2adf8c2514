"""Made-up results with round numbers."""

from typing import Any

from jaxllm.scaling.plan import DECODE, PREFILL, Plan
from jaxllm.scaling.results import GPU_KERNELS, AllReduce, Breakdown, Results, Row, SizeResult, Skipped

PLAN = Plan(
    model="some/model",
    tensor_parallel_sizes=(1, 2, 4),
    batch_sizes=(1, 8),
    input_len=16,
    output_len=11,
    works=(DECODE, PREFILL),
    options={"load_format": "dummy", "decode_buckets": [8]},
)
LIMITS = {"copy_bytes_per_second": 3.9e12, "gemm_flops_per_second": 680e12, "gemm_dtype": "bfloat16"}
ENGINE = {
    "device": "NVIDIA H200",
    "platform": "gpu",
    "jax": "0.11.2",
    "read_bytes_per_step": 16e9,
    "cache_bytes_per_token": 131072,
    "start_seconds": 50.0,
    "kernels": {"sampling": "triton (passed)"},
    "options": {"model": "some/model"},
}


def decode(size: int, batch: int, ms: float, **changes: Any) -> Row:
    """A decode of ten steps that took `ms` each, in the second of two runs."""
    values: dict[str, Any] = {
        "num_tokens": 10 * batch,
        "num_steps": 10,
        "run_seconds": [ms / 100 + 1, ms / 100],
        "least_seconds": ms / 200,
        "num_prompt_tokens": 16 * batch,
        "mean_context": 30.5,
        "step_seconds": [ms / 1000] * 10,
        "host_ms": {"dispatch": 0.5, "launch": 0.25, "wait": 0.75},
    }
    return Row(size, DECODE, batch, **(values | changes))


def prefill(size: int, tokens_per_second: float) -> Row:
    return Row(size, PREFILL, 64, 1000, 4, [1000 / tokens_per_second], 0.001, 1000)


def breakdown(size: int, batch: int, **changes: Any) -> Breakdown:
    values: dict[str, Any] = {
        "num_steps": 8,
        "source": GPU_KERNELS,
        "parts_ms": {"products": 4.0, "attention": 1.0, "communication": 0.5 * (size > 1), "other": 0.5},
        "hidden_communication_ms": 0.0,
        "waiting_ms": 0.125 if size > 1 else None,
        "gaps_ms": 0.25,
        "launches": 300.0,
        "traced_ms": 7.0,
        "step_ms": 6.25,
        "top": [("nvjet_<a> & b", "products", 1.5, 32.0)],
    }
    return Breakdown(size, DECODE, batch, **(values | changes))


def results() -> Results:
    """Sizes 1, 2 and 4; the last one failed after its first rows."""
    one = SizeResult(1, 60.0, ENGINE, LIMITS, [decode(1, 1, 8.0), decode(1, 8, 10.0), prefill(1, 1000.0)], [breakdown(1, 8)])
    two = SizeResult(
        2,
        50.0,
        ENGINE,
        LIMITS,
        [decode(2, 1, 5.0), decode(2, 2, 5.0), decode(2, 8, 6.25), decode(2, 16, 12.5), prefill(2, 1600.0)],
        [breakdown(2, 8)],
        [AllReduce(2, 8, 4096, "bfloat16", 65536, 2e-5, 64)],
    )
    four = SizeResult(4, 30.0, ENGINE, LIMITS, [decode(4, 8, 5.0, note="7 of 10 steps | odd")])
    four.skipped.append(Skipped(4, DECODE, 32, "needs 900 tokens of KV cache, 800 are there"))
    four.failure = "the process ended by SIGKILL"
    return Results(PLAN, {"jaxllm": "0.1.0", "python": "3.12.1 (x)"}, "jaxllm bench scaling", "2030-01-01", [one, two, four])
