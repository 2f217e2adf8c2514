"""Compiler options of a step's program, and its memory."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.runner.step_programs import ProgramKey, StepPrograms
from tests.helpers.engines import make_core

NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}
APART = {"xla_gpu_dot_merger_threshold_mb": "0"}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no collective kernels to leave out")
@pytest.mark.parametrize(
    ("platform", "num_devices", "rows", "options"),
    [
        ("gpu", 1, 8, APART),
        ("gpu", 1, 64, APART | CUBLAS),
        ("gpu", 2, 8, APART | NCCL),
        ("cuda", 4, 64, APART | NCCL | CUBLAS),
        ("cpu", 2, 64, {}),
    ],
)
def test_products_are_not_merged_large_ones_go_to_cublas_and_all_reduces_to_nccl(platform, num_devices, rows, options) -> None:
    devices = np.array([SimpleNamespace(platform=platform)] * num_devices)
    programs = SimpleNamespace(mesh=SimpleNamespace(devices=devices, size=num_devices))
    assert StepPrograms.compiler_options(programs, ProgramKey("decode", rows)) == options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen2", {"dtype": "float32"}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen2", {"dtype": "float32", "kv_cache_dtype": "fp8"}),
        ("qwen2_window", {"dtype": "float32"}),  # two layers that share their arrays
    ],
)
def test_no_step_copies_the_cache_on_a_cpu(model: str, options: dict[str, str]) -> None:
    core = make_core(model, num_gpu_blocks_override=8192, **options)
    try:
        pool_bytes = core.runner.caches[0].nbytes
        for key in (ProgramKey("forward", 112), ProgramKey("decode", 4)):
            used = core.runner.programs.get(key).memory_analysis()
            assert used.alias_size_in_bytes >= len(core.runner.caches) * pool_bytes
            assert used.temp_size_in_bytes < pool_bytes, f"{key} needs {used.temp_size_in_bytes} bytes"
    finally:
        core.shutdown()
