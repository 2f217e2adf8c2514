"""Random arrays in NumPy, quickly: a check at an engine's start has a second for all of them."""

import functools

import numpy as np
from jax.typing import DTypeLike

_POOL = 999_983  # a prime: no row, page or head repeats another at the same place


@functools.cache
def _pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32)


class Normals:
    """Arrays of normal values, the same from each of these. Beyond a million they repeat."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, *shape: int) -> np.ndarray:
        """Float32, a copy."""
        size = int(np.prod(shape))
        first = self._next
        self._next = (first + size) % _POOL
        return np.take(_pool(), np.arange(first, first + size), mode="wrap").reshape(shape)

    def of(self, dtype: DTypeLike, *shape: int) -> np.ndarray:
        """Rounded to a type."""
        return self(*shape).astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, NaN too."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
