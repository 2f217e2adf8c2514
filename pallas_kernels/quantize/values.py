"""Arrays with their scales: operands of a product in 8-bit floats, and its sums."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0
"""The largest value of the type. A conversion beyond it gives NaN, so values are clipped first."""
TINY = 1e-20
"""Stands for the largest value of an all-zero vector, which would have no scale."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """Vectors as values_TN * scale_T[:, None]: values in float8_e4m3fn, a float32 scale for each."""

    values_TN: jax.Array
    scale_T: jax.Array

    def __len__(self) -> int:
        return len(self.scale_T)

    def __getitem__(self, index: slice | jax.Array) -> "Quantized":
        """Some of the vectors."""
        return Quantized(self.values_TN[index], self.scale_T[index])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """A product of which no scale has been applied: values * the row's scale * the column's scale. Scales are float32.

    values [T, *outputs], row_scale_T those of the vectors, column_scale [*outputs] those of the weight.
    """

    values: jax.Array
    row_scale_T: jax.Array
    column_scale: jax.Array

    def __len__(self) -> int:
        return len(self.row_scale_T)

    def __getitem__(self, index: slice | jax.Array) -> "Sums":
        """Some of the rows."""
        return Sums(self.values[index], self.row_scale_T[index], self.column_scale)

    def scaled(self, dtype: DTypeLike | None = None) -> jax.Array:
        """[T, *outputs] in a type; None: that of the values."""
        row_scale = self.row_scale_T.reshape(-1, *(1,) * self.column_scale.ndim)
        return (self.values.astype(jnp.float32) * row_scale * self.column_scale).astype(dtype or self.values.dtype)


def scaled(product: jax.Array | Sums) -> jax.Array:
    """A product with its scales applied, whether they were before or not."""
    return product.scaled() if isinstance(product, Sums) else product
