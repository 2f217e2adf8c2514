"""Rows of host memory that kernels of CUDA write into blocks of small caches: what JAX scatters on the CPU, without damaged rows.

Hardly anything else runs on the device, for a run under compute-sanitizer.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache_spec import CacheArray, CacheLayout
from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies.arena import PAGE_BYTES, Arena
from jaxllm.runner.features.block_copies.cuda import CudaTransfer
from scripts.gpu_checks import Outcome, skip

CACHES = {
    "fp8 cache": ([CacheArray(8, 128, "float8_e4m3fn")] * 4, 16),
    "latents": ([CacheArray(1, 576, "bfloat16")] * 3, 16),
    "heads of several numbers": ([CacheArray(4, 256, "bfloat16"), CacheArray(8, 64, "bfloat16")], 16),
    "heads of odd widths": ([CacheArray(2, 3, "bfloat16"), CacheArray(3, 6, "float32"), CacheArray(2, 5, "bfloat16")], 2),
}
"""Arrays, and tokens of a block."""
NUM_BLOCKS, NUM_ROWS = 40, 19


def check() -> Iterator[Outcome]:
    """A load of each kind of cache."""
    for name, (arrays, block_size) in CACHES.items():
        name = f"block writer, {name}"
        if jax.default_backend() != "gpu":
            yield skip(name, "kernels of CUDA need a GPU")
            continue
        num_wrong, is_reported = _load(arrays, block_size)
        told = "the damaged row alone is reported" if is_reported else "other rows than the damaged one are reported"
        yield Outcome(name, not num_wrong and is_reported, f"{num_wrong} bytes wrong after {NUM_ROWS} rows; {told}")


def _load(arrays: list[CacheArray], block_size: int) -> tuple[int, bool]:
    """Number of wrong bytes in the caches after a load with a damaged row, and whether that row alone is reported as damaged."""
    format = BlockFormat.of(CacheLayout((), tuple(arrays), (), (), block_size=block_size, max_step_tokens=8), 1)
    rng = np.random.default_rng(0)
    slots, targets = rng.permutation(NUM_ROWS), rng.permutation(NUM_BLOCKS)[:NUM_ROWS].astype(np.int32)
    arena = Arena(NUM_ROWS * (format.block_bytes + PAGE_BYTES), format)
    arena.open()
    transfer = CudaTransfer(arena, format, [0], max_rows=NUM_ROWS, num_loads=1)
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            content = [_random(rng, array, block_size) for array in arrays]
            words, sums = format.gather(content, jnp.arange(NUM_ROWS))
            arena.words[slots, 0] = words
            arena.words[slots[1], 0, 5] ^= 1 << 9
            before = [_random(rng, array, block_size) for array in arrays]
            expected, is_right = format.scatter(before, jnp.asarray(targets), jnp.asarray(arena.words[slots, 0]), sums)
        device = jax.devices()[0]
        caches = jax.block_until_ready([jax.device_put(cache, device) for cache in before])
        staging = jax.device_put(np.zeros((1, NUM_ROWS, format.part_words), np.uint32), device).block_until_ready()
        where, given = transfer.addresses(caches), np.asarray(sums)[None]
        wait = transfer.load(0, staging, slots.tolist(), targets.tolist(), given, where, is_alone=True)
        is_row_right, _ = wait()
        wrong = sum(int((_bytes(cache) != _bytes(right)).sum()) for cache, right in zip(caches, expected, strict=True))
        return wrong, is_row_right.tolist() == np.asarray(is_right).tolist() == [row != 1 for row in range(NUM_ROWS)]
    finally:
        transfer.close()
        arena.close()


def _random(rng: np.random.Generator, array: CacheArray, block_size: int) -> jax.Array:
    """A cache of random bits."""
    shape, dtype = (NUM_BLOCKS, array.num_heads, block_size, array.width), jnp.dtype(array.dtype)
    return jnp.asarray(np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape))


def _bytes(cache: jax.Array) -> np.ndarray:
    return np.asarray(cache).view(np.uint8)
