"""Queries the driver for this machine's NVIDIA GPUs, their number and memory, without starting JAX on them.

CUDA says which GPUs this process may use, in its own order (CUDA_VISIBLE_DEVICES as indices or UUIDs, CUDA_DEVICE_ORDER, MIG);
NVML says how much memory of each is free, which CUDA would tell only with a context on it. Where either is missing, nothing is known.
"""

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_CUDA, _NVML = "libcuda.so.1", "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use."""

    index: int
    """As nvidia-smi counts; CUDA_VISIBLE_DEVICES may have made it another number for JAX."""
    name: str
    total_bytes: int
    """Bytes that programs can use."""
    free_bytes: int

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that JAX will find, in its order; none if a library or an answer is missing."""
    cuda = _library(_CUDA)
    if cuda is None or cuda.cuInit(0):
        return ()
    with _nvml() as nvml:
        count = ctypes.c_int()
        if nvml is None or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        found = [_gpu(cuda, nvml, ordinal) for ordinal in range(count.value)]
    return tuple(gpu for gpu in found if gpu is not None) if None not in found else ()


def count() -> int:
    """How many GPUs this process may use; 0 without CUDA."""
    cuda, found = _library(_CUDA), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(found)):
        return 0
    return found.value


def smallest_total_bytes(num_devices: int = 1) -> int | None:
    """The memory of the smallest of the first GPUs that this process may use; None if CUDA finds none."""
    cuda = _library(_CUDA)
    if cuda is None or cuda.cuInit(0):
        return None
    sizes = [size for ordinal in range(num_devices) if (size := _total_bytes(cuda, ordinal)) is not None]
    return min(sizes, default=None)


def hidden_gpus(num_visible: int) -> str | None:
    """`CUDA_VISIBLE_DEVICES=0 hides 3 of 4 GPUs`, if it is set and hides any; `num_visible`: the GPUs that JAX found.

    None too if JAX found fewer than CUDA shows: then it is not the variable that hides them.
    """
    asked, cuda, shown = os.environ.get("CUDA_VISIBLE_DEVICES"), _library(_CUDA), ctypes.c_int()
    if asked is None or cuda is None:
        return None
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(shown)):
        shown.value = 0  # cuInit fails if all are hidden
    if shown.value != num_visible:
        return None
    with _nvml() as nvml:
        count = ctypes.c_uint()
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or count.value <= num_visible:
            return None
    return f"CUDA_VISIBLE_DEVICES={asked} hides {count.value - num_visible} of {count.value} GPUs"


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _library(name: str) -> Any:
    """None if this machine has no such library."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, started; None if it is missing or does not start."""
    nvml = _library(_NVML)
    if nvml is None or nvml.nvmlInit_v2():
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _gpu(cuda: Any, nvml: Any, ordinal: int) -> Gpu | None:
    total_bytes, handle = _total_bytes(cuda, ordinal), _handle(cuda, nvml, ordinal)
    memory, index, name = _Memory(), ctypes.c_uint(), ctypes.create_string_buffer(96)
    if total_bytes is None or handle is None or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    if nvml.nvmlDeviceGetIndex(handle, ctypes.byref(index)):
        index.value = ordinal
    if nvml.nvmlDeviceGetName(handle, name, len(name)):
        name.value = b"NVIDIA GPU"
    return Gpu(index.value, name.value.decode(errors="replace"), total_bytes, memory.free)


def _total_bytes(cuda: Any, ordinal: int) -> int | None:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    return size.value


def _handle(cuda: Any, nvml: Any, ordinal: int) -> ctypes.c_void_p | None:
    """NVML's name for the device that CUDA calls so; by its UUID, as the two count in different orders."""
    device, identity = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid_v2(ctypes.byref(identity), device):
        return None
    handle, text = ctypes.c_void_p(), str(uuid.UUID(bytes=bytes(identity)))
    for kind in ("GPU", "MIG"):
        if not nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{text}".encode(), ctypes.byref(handle)):
            return handle
    return None
