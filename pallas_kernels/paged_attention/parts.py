"""Caches that devices split by tokens: each holds a part of every row's keys, attends to that part, and the results are combined.

    positions      0 .. S-1 | S .. 2S-1 | ... | (C-1)S .. CS-1 | CS .. (C+1)S-1 | ...
    part           0        | 1         | ... | C-1            | 0              | ...
    page of a row  0        | 0         | ... | 0              | 1              | ...

With C parts and pages of S slots, a part holds every C-th page of a row, in the order of positions. So of the keys before a position it
holds those in its first so many slots: causal limits and windows become ranges of slots, and masks need no positions of keys.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

NO_KEYS = -1e30
"""In place of the logarithm of the softmax's sum where a query sees no key of a part: finite, so that differences are no NaN."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """Which part of the keys a cache holds."""

    rank: ArrayLike
    """int32 scalar, from 0; may be traced."""
    count: int = field(metadata={"static": True})
    """Number of parts, 1 or more."""

    def keys_before(self, position: jax.Array, page_size: int) -> jax.Array:
        """Number of keys of a row in this part that stand before a position (int32, any shape; below zero counts as 0)."""
        stride = self.count * page_size
        position = jnp.maximum(position, 0)
        whole, rest = lax.div(position, stride), lax.rem(position, stride)
        return whole * page_size + jnp.clip(rest - self.rank * page_size, 0, page_size)


def combine(out_C: jax.Array, lse_C: jax.Array, sinks_KG: jax.Array | None = None) -> jax.Array:
    """Attention over all keys, [..., K, G, H], of that over each part.

    out_C: [C, ..., K, G, H], results over the parts; those of the same query add up, weighted by their share of the softmax's sum.
    lse_C: float32 [C, ..., K, G], natural logarithms of these sums, NO_KEYS where a part has no key for a query.
    sinks_KG: as of `paged_attention`: they count once, here. A query without any key gives zeros.
    """
    top = lse_C.max(axis=0)
    if sinks_KG is not None:
        top = jnp.maximum(top, sinks_KG)
    weight_C = jnp.exp(lse_C - top)
    total = weight_C.sum(axis=0)
    if sinks_KG is not None:
        total += jnp.exp(sinks_KG - top)
    share_C = weight_C / total
    return (out_C.astype(jnp.float32) * share_C[..., None]).sum(axis=0).astype(out_C.dtype)
