"""Where the time of a step goes: names of kernels, and traces made by hand."""

import pytest

from jaxllm.measuring.trace import Kernel, Trace
from jaxllm.scaling.breakdown import break_down, part_of, time_by_part, waiting_time
from jaxllm.scaling.results import CPU_THUNKS, GPU_KERNELS, Breakdown


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_hsh_128x64_64x9_1x2_h_bz_coopA_NTN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "products"),
        ("cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("gemm_fusion_dot_12", "products"),
        ("paged_decode", "attention"),
        ("paged_decode_combine", "attention"),
        ("mosaic_gpu_paged_attention_prefill_kernel", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("all_reduce_kernel", "communication"),
        ("xla::AllReduceKernelImpl<bfloat16>", "communication"),
        ("reduce_scatter_start", "communication"),
        ("one_shot_collective", "communication"),
        ("mosaic_gpu_all_reduce_norm_8x4096_kernel", "communication"),
        ("mosaic_gpu_all_to_all_4096_4", "communication"),
        ("rope_and_write", "other"),
        ("argmax_combine", "other"),
        ("input_reduce_fusion_3", "other"),
        ("loop_add_fusion", "other"),
    ],
)
def test_kernels_by_name(name: str, part: str) -> None:
    assert part_of(name, GPU_KERNELS) == part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("dot.3", "products"),
        ("ynn_fusion.13", "products"),
        ("loop_dot_fusion", "products"),
        ("all-reduce.12", "communication"),
        ("all-gather-start", "communication"),
        ("psum.91", "communication"),
        ("pmax.3", "communication"),
        ("wrapped_add", "other"),
        ("fusion.7", "other"),
    ],
)
def test_thunks_by_name(name: str, part: str) -> None:
    assert part_of(name, CPU_THUNKS) == part


def test_each_moment_counts_once() -> None:
    times, hidden = time_by_part(
        [
            (0.0, 10.0, "products"),
            (8.0, 12.0, "communication"),  # two of them during the product
            (11.0, 14.0, "other"),  # one of its moments is the communication's, which this hides
            (20.0, 25.0, "attention"),
            (22.0, 30.0, "products"),  # beats attention for three
            (30.0, 31.0, "communication"),
        ]
    )
    assert times == {"products": 18.0, "attention": 2.0, "communication": 2.0, "other": 3.0}
    assert hidden == 3.0
    assert time_by_part([]) == ({"products": 0.0, "attention": 0.0, "communication": 0.0, "other": 0.0}, 0.0)


def kernels(*spans: tuple[str, float, float], device: str = "a") -> list[Kernel]:
    return [Kernel(name, start, end, device) for name, start, end in spans]


def of_one_step(trace: Trace, step_seconds: float) -> Breakdown:
    return break_down(trace, 1, "decode", 1, num_steps=1, step_seconds=step_seconds)


def test_waiting_is_what_the_last_device_does_not_have() -> None:
    first = kernels(("nccl", 0, 10), ("nccl", 20, 22))
    second = kernels(("nccl", 6, 10), ("nccl", 20, 22), device="b")
    assert waiting_time([first, second]) == pytest.approx((10 + 4) / 2 - 4)
    assert waiting_time([first]) is None
    assert waiting_time([first, second[:1]]) is None


def test_a_breakdown_adds_up_to_the_untraced_step() -> None:
    """Two devices, two steps: microseconds become milliseconds per step and device."""
    spans = [
        *kernels(("gemm", 0, 1000), ("nccl", 1000, 1600), ("paged_decode", 1600, 2000)),
        *kernels(("gemm", 0, 1200), ("nccl", 1200, 1600), ("rope", 1600, 1800), device="b"),
    ]
    found = break_down(Trace(0.0, 4000.0, spans, []), 2, "decode", 8, num_steps=2, step_seconds=1.5e-3)
    assert found.parts_ms == pytest.approx({"products": 0.55, "attention": 0.1, "communication": 0.25, "other": 0.05})
    assert found.gaps_ms == pytest.approx(1.5 - 0.95)
    assert sum(found.parts_ms.values()) + found.gaps_ms == pytest.approx(found.step_ms)
    assert found.waiting_ms == pytest.approx(0.05)
    assert (found.launches, found.traced_ms, found.source) == (1.5, 2.0, "gpu kernels")
    assert found.top[0] == ("gemm", "products", pytest.approx(0.5), 0.5)


def test_kernels_that_take_longer_than_the_step_leave_no_gaps() -> None:
    found = of_one_step(Trace(0.0, 100.0, kernels(("gemm", 0, 100)), []), 50e-6)
    assert found.gaps_ms == 0.0 and found.waiting_ms is None


def test_a_cpu_tells_what_it_can() -> None:
    thunks = kernels(("while.3", 0, 100), ("dot.1", 0, 40), ("all-reduce.2", 50, 60), ("fusion", 60, 80), device="CPU:0")
    found = of_one_step(Trace(0.0, 100.0, [], [], thunks), 1e-4)
    assert found.source == "cpu thunks"
    assert found.parts_ms == pytest.approx({"products": 0.04, "attention": None, "communication": 0.01, "other": 0.02})
    assert found.gaps_ms is None and found.waiting_ms is None
    with pytest.raises(ValueError, match="holds nothing of the device"):
        of_one_step(Trace(0.0, 100.0, [], []), 1e-4)
