"""Compiles the check cases of ops for a Hopper GPU, without one: whether the assembler takes every kernel, with its registers and spills.

python scripts/gpu_checks/compiled.py quantized    a line for each case and variant, and what ptxas says; exit status 1 if one fails

Needs JAX 0.11 with `jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`, but no driver. Nothing is run or tuned.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  kernel_mode_driver_version: "580.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def compile_all(names: list[str]) -> int:
    """How many programs failed to compile."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.devices()  # finds the plugin
    # Cases are made for the platform that computes them. No program runs here.
    jax.default_backend = lambda: "gpu"
    from scripts.kernels import cases
    from scripts.kernels.compiling import first_line

    devices = topologies.get_topology_desc("h200", platform="cuda", target_config=TARGET, topology="1x1x1").devices
    mesh = Mesh(devices, ("all",))
    sharding, num_failed = NamedSharding(mesh, PartitionSpec()), 0

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    for name, case in cases("check", names, tiny=False):
        arguments = jax.tree.map(placed, jax.eval_shape(case.make))
        for variant, function in case.variants.items():
            print(f"{name}: {case.name}, {variant}", flush=True)
            try:
                with jax.sharding.set_mesh(mesh):
                    jax.jit(function).trace(arguments[0], *arguments[1]).lower().compile()
            except Exception as problem:
                num_failed += 1
                print(f"FAIL {first_line(problem)}", flush=True)
    return num_failed


def _prepare() -> None:
    """Set what JAX reads when it is imported."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(folder) / "cu13" for folder in (nvidia.submodule_search_locations or ())] if nvidia else []
    found = next((folder for folder in folders if (folder / "bin/ptxas").exists()), None)
    if found is None:
        sys.exit("no ptxas: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm")
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={found}"
    os.environ["PATH"] += f":{found}/bin"


if __name__ == "__main__":
    _prepare()
    sys.path.insert(0, os.getcwd())
    sys.exit(min(1, compile_all(sys.argv[1:])))
