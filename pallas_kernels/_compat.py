"""The one place that knows what differs between the JAX versions (0.10.2 to 0.12) and backends that the kernels run on."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# JAX >= 0.11 warns at every lowering of a Pallas-Triton kernel. The warning comes at compile time, out of reach of a
# `catch_warnings` around the call, so this one message is silenced for the process.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

DEFAULT_NUM_CORES = 132  # streaming multiprocessors of an H100 or H200

load = plt.load
store = plt.store
inline_asm = plt.elementwise_inline_asm


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` on the Triton backend; every operand is one whole array that the kernel indexes itself.

    The compiler parameters are always given: which backend `pallas_call` takes without them changed between 0.10 and 0.11.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(input_output_aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )


def num_cores() -> int:
    """Streaming multiprocessors of the GPU that is being compiled for; that of an H200 where there is none."""
    try:
        device = jax.local_devices()[0]
    except RuntimeError:
        return DEFAULT_NUM_CORES
    return int(getattr(device, "core_count", 0) or DEFAULT_NUM_CORES) if device.platform == "gpu" else DEFAULT_NUM_CORES


def triton_converts_fp8() -> bool:
    """Whether a Triton kernel can read float8_e4m3fn on the GPU that is being compiled for: from compute capability 8.9 on."""
    capability = _capability()
    return capability is None or float(capability) >= 8.9


def _capability() -> str | None:
    """Compute capability of the GPU that is being compiled for, as "9.0"; None where there is none."""
    try:
        return getattr(jax.local_devices()[0], "compute_capability", None)
    except RuntimeError:
        return None


def dot_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in a Triton kernel with float32 accumulation; float32 operands are multiplied in full precision, never as TF32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jax.numpy.float32 else None,
        preferred_element_type=jax.numpy.float32,
    )


def has_mosaic() -> bool:
    """Whether Mosaic kernels for Hopper can be built: JAX 0.10 lacks parts of what they use, and another GPU the instructions.

    Where there is no GPU, programs may be compiled for one elsewhere.
    """
    return jax.__version_info__ >= (0, 11) and _capability() in (None, "9.0")


def mosaic() -> Any:
    """`jax.experimental.pallas.mosaic_gpu`, imported on first use: in JAX 0.10 it needs a package that JAX does not require."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def tile_rows(ref: Any) -> int:
    """Rows of the tiles that a Mosaic kernel's reference to shared memory is laid out in; 1 if it is not tiled."""
    tilings = [transform.tiling for transform in getattr(ref, "transforms", ()) if hasattr(transform, "tiling")]
    return max((tiling[-2] for tiling in tilings), default=1)


def mosaic_interpret(interpret: Any, **options: Any) -> Any:
    """The `interpret` argument of `plgpu.kernel` for a flag, or for `InterpretGPUParams` that a test made itself."""
    return mosaic().InterpretGPUParams(**options) if interpret is True else interpret or None


def load_smem(ref: Any, layout: Any) -> jax.Array:
    """A whole reference, in the given register layout."""
    return mosaic().load(ref, layout=layout)


def add_wgmma(acc: jax.Array, a: Any, b: Any, *, interpret: bool) -> jax.Array:
    """acc + a @ b by the tensor cores, a and b in shared memory. The interpreter cannot start from an accumulator."""
    plgpu = mosaic()
    if interpret:

        def product(acc_ref: Any) -> jax.Array:
            plgpu.wgmma(acc_ref, a, b)
            return acc_ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, acc.dtype))
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(plgpu.ACC.init(acc))
