"""The cache write by every implementation: exact, and nothing else in the cache may change."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_write import IMPLEMENTATIONS, write_cache
from pallas_kernels.checking.case import Case

Caches = tuple[jax.Array, jax.Array]


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """A decode's and a prefill's number of tokens."""
    if tiny:
        return [_case(16, 2, 16, num_pages=64, page_size=8)]
    return [_case(tokens, 8, dim, num_pages=8192) for dim in (128, 64) for tokens in (64, 256, 8192)]


def check_cases(tiny: bool) -> list[Case]:
    """Odd numbers of tokens and widths, some tokens dropped."""
    if tiny:
        return [_case(13, 2, 64, num_pages=8)]
    shapes = ((1, 8, 128), (13, 8, 64), (512, 1, 256), (100, 3, 80), (8192, 8, 128))
    return [_case(*shape, num_pages=1024, dtype=dtype) for shape in shapes for dtype in ("bfloat16", "float32")]


def _case(
    num_tokens: int, num_kv_heads: int, head_dim: int, *, num_pages: int, page_size: int = 16, dtype: str = "bfloat16"
) -> Case:
    def make() -> tuple[Caches, tuple[jax.Array, ...]]:
        keys = jax.random.split(jax.random.key(0), 4)
        x, y = (jax.random.normal(key, (num_tokens, num_kv_heads, head_dim), jnp.dtype(dtype)) for key in keys[:2])
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        caches = tuple(jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys[2:])
        slot = np.random.default_rng(0).permutation(num_pages * page_size)[:num_tokens]
        slot[::7] = -1
        return caches, (x, y, jnp.asarray(slot.astype(np.int32)))  # type: ignore[return-value]

    num_bytes = 4.0 * num_tokens * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize
    name = f"write {num_tokens} tokens k{num_kv_heads} h{head_dim}" + ("" if dtype == "bfloat16" else f" {dtype}")
    return Case(name, make, _variants(dtype, head_dim), _error, tolerance=0.0, bytes=num_bytes)


def _variants(dtype: str, head_dim: int) -> dict[str, Callable[..., Caches]]:
    on_gpu = jax.default_backend() == "gpu"
    found = {}
    for name, path in IMPLEMENTATIONS.items():
        supports: Any = importlib.import_module(path).supports
        if supports(platform=jax.default_backend(), dtype=jnp.dtype(dtype), head_dim=head_dim, interpret=not on_gpu):
            found[name] = functools.partial(_write, name, not on_gpu)
    return found


def _write(implementation: str, interpret: bool, caches: Caches, x: jax.Array, y: jax.Array, slot: jax.Array) -> Caches:
    return write_cache(*caches, x, y, slot, implementation=implementation, interpret=interpret)


def _error(before: Caches, constants: tuple[jax.Array, ...], after: Caches) -> float:
    *written, slot = (np.asarray(array) for array in constants)
    kept = slot >= 0
    for old, new, x in zip(before, after, written, strict=True):
        expected = np.array(old)
        size = old.shape[2]
        expected[slot[kept] // size, :, slot[kept] % size] = x[kept]
        if expected.tobytes() != np.asarray(new).tobytes():
            return math.inf
    return 0.0
