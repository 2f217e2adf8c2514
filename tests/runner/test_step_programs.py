"""What XLA is told beside a program."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.runner.step_programs import ProgramKey, StepPrograms

NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no collective kernels to leave out")
@pytest.mark.parametrize(
    ("platform", "num_devices", "rows", "options"),
    [("gpu", 1, 8, {}), ("gpu", 1, 64, CUBLAS), ("gpu", 2, 8, NCCL), ("cuda", 4, 64, NCCL | CUBLAS), ("cpu", 2, 64, {})],
)
def test_large_products_go_to_cublas_and_all_reduces_to_nccl(platform, num_devices, rows, options) -> None:
    devices = np.array([SimpleNamespace(platform=platform)] * num_devices)
    programs = SimpleNamespace(mesh=SimpleNamespace(devices=devices, size=num_devices))
    assert StepPrograms.compiler_options(programs, ProgramKey("decode", rows)) == options
