"""The pieces of a head's width that kernels for wide heads load one after the other."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat


@dataclass(frozen=True)
class Pieces:
    """Equal parts of a head's values; the last one may lack some, or all if a program's share of the pieces has one more."""

    head_dim: int
    width: int
    """Values of a piece, a power of two."""

    @property
    def count(self) -> int:
        return -(-self.head_dim // self.width)

    def at(self, piece: Any, lines: tuple[Any, ...], is_read_L1: jax.Array | None) -> tuple[tuple[Any, ...], jax.Array | None]:
        """Index and mask of a piece of some heads. lines: the index before the values. is_read_L1: of lines; None: all are."""
        dim_1H = (piece * self.width + jnp.arange(self.width))[None, :]
        mask = None if is_read_L1 is None else jnp.broadcast_to(is_read_L1, (is_read_L1.shape[0], self.width))
        if self.head_dim % self.width:
            in_head_LH = jnp.broadcast_to(dim_1H < self.head_dim, (lines[-1].shape[0], self.width))
            mask = in_head_LH if mask is None else mask & in_head_LH
        return (*lines, dim_1H), mask

    def load(self, ref: Any, piece: Any, lines: tuple[Any, ...], is_read_L1: jax.Array | None) -> jax.Array:
        """A piece of some heads, 0 where it is not read."""
        index, mask = self.at(piece, lines, is_read_L1)
        return _compat.load(ref.at[index], mask=mask, other=None if mask is None else 0.0)
