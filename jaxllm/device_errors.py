"""Classifies errors of devices by their texts. Does not import JAX."""

import enum

from jaxllm import address_space
from jaxllm.errors import EngineDeadError, OutOfMemoryError

_OUT_OF_POOL = "RESOURCE_EXHAUSTED"
"""Part of XLA's error text when its pool has no memory left."""
_OUT_OF_DEVICE = (
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to allocate collective memory",
)
"""Parts of the errors of libraries that allocate outside the pool: CUDA itself (code and graphs) and NVIDIA's libraries."""
_COLLECTIVES = ("NCCL", "nccl")
_OUT_OF_COLLECTIVES = ("out of memory", "Failed to CUDA", "calloc", "alloc failed", "failed to allocate")
"""Parts of NCCL's error texts, in addition to its name, when it found no memory for a communicator, which is then lost."""
_DEVICE_IS_LOST = (
    "CUDA_ERROR",
    "cudaError",
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert",
    *_COLLECTIVES,
    "DATA_LOSS",
)
"""Parts of the texts of errors after which every later call to the device fails too."""


class Failure(enum.Enum):
    """The kinds of failed steps."""

    OUT_OF_MEMORY = enum.auto()
    STEP = enum.auto()
    ENGINE = enum.auto()


def kind_of(error: BaseException) -> Failure:
    """Classify an error in a step by its text and the texts of its causes."""
    texts = _texts(error)
    if isinstance(error, OutOfMemoryError) or _has(texts, _OUT_OF_POOL):
        return Failure.OUT_OF_MEMORY
    if _has(texts, *_OUT_OF_DEVICE) and not _has(texts, *_COLLECTIVES):
        return Failure.OUT_OF_MEMORY
    if isinstance(error, EngineDeadError) or _has(texts, *_DEVICE_IS_LOST):
        return Failure.ENGINE
    return Failure.STEP


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory, for a step or for the setup of collectives before the first step."""
    texts = _texts(error)
    for_collectives = any(_has([text], *_COLLECTIVES) and _has([text], *_OUT_OF_COLLECTIVES) for text in texts)
    if isinstance(error, OutOfMemoryError) or for_collectives or address_space.is_full(error):
        return True
    return _has(texts, _OUT_OF_POOL, *_OUT_OF_DEVICE)


def is_out_of_pool(error: BaseException) -> bool:
    """Whether JAX's own pool had too little, not the rest of the device's memory."""
    return _has(_texts(error), _OUT_OF_POOL)


def _texts(error: BaseException) -> list[str]:
    """The texts of an error and its causes."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 8:
        texts.append(str(cause))
        cause = cause.__cause__
    return texts


def _has(texts: list[str], *parts: str) -> bool:
    return any(part in text for text in texts for part in parts)
