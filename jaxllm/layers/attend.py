"""The interfaces between attention layers and the functions that compute attention for them."""

from dataclasses import dataclass, field
from typing import Protocol

import jax
from jax import Array

from pallas_kernels.rope_cache_write.xla import rotated_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """Queries, keys and values from the projection, with the norm and rotation still to be applied.

    These are applied later because, with a paged cache, one kernel norms and rotates them while writing to the cache.
    """

    qkv_TKGH: Array
    """[T, K, G + 2, H]: per KV head its G query heads, its key, its value."""
    cos_TH: Array
    """Float32 [T, H / 2], as is sin_TH: the angles of the tokens' positions."""
    sin_TH: Array
    q_norm_H: Array | None
    """Weight of the RMS norm over each query head, in models that have it, without norm_offset; k_norm_H alike."""
    k_norm_H: Array | None
    kv_scale_2: Array | None
    """Float32: what a cache of a narrow type divides keys and values by; None: by nothing."""
    eps: float = field(metadata={"static": True})
    norm_offset: float = field(default=0.0, metadata={"static": True})

    def finished(self) -> tuple[Array, Array, Array]:
        """Queries [T, K, G, H], keys and values [T, K, H] as attention takes them."""
        return rotated_heads(
            self.qkv_TKGH,
            self.cos_TH,
            self.sin_TH,
            q_norm_H=self.q_norm_H,
            k_norm_H=self.k_norm_H,
            eps=self.eps,
            norm_offset=self.norm_offset,
        )


class Attend(Protocol):
    """Computes attention of a layer: over a paged cache when serving, over the sequence itself in training and tests."""

    def __call__(
        self,
        layer: int,
        projection: Projection,
        /,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_KG: Array | None = None,
    ) -> Array:
        """Outputs [T, K, G, H]; query head n is (n // G, n % G). sinks_KG: float32, see `Attention.sinks`."""
        ...


class AttendToLatents(Protocol):
    """The same of a layer whose tokens have one vector each, which all heads share: it is their key, its first values their value."""

    def __call__(self, layer: int, q_TNC: Array, latent_TC: Array, /, *, value_dim: int, scale: float) -> Array:
        """Outputs [T, N, value_dim] of queries that are normed and rotated already, as the new tokens' vectors are."""
        ...
