"""The interfaces between attention layers and the functions that compute attention for them."""

from dataclasses import dataclass, field
from typing import Protocol

import jax
from jax import Array

from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.rope_cache_write.xla import apply_rope, rms_norm, rotated_heads


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
        reads_layer: int | None = None,
        chunk: int | None = None,
    ) -> Array:
        """Outputs [T, K, G, H]; query head n is (n // G, n % G). sinks_KG: float32, see `Attention.sinks`. reads_layer: the layer whose
        keys and values are read, in place of those of the projection. chunk: see `Attention.chunk`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentProjection:
    """As `Projection`, for latent attention: a vector per token, of which all heads' keys and values are made."""

    q_TNH: Array
    """[T, N, P + E], of which the last E values are to be rotated."""
    vector_TC: Array
    """[T, L + E]: a latent, to be normed, and the rotated part of the key."""
    cos_TE: Array
    """Float32 [T, E / 2], as is sin_TE: the angles of the tokens' positions."""
    sin_TE: Array
    norm_L: Array
    """Weight of the RMS norm over latents."""
    key_NPL: Array
    """Makes keys of latents, as value_NVL values."""
    value_NVL: Array
    eps: float = field(metadata={"static": True})

    def finished(self) -> Tokens:
        """Queries and vectors as attention takes them."""
        (latent_dim,), angles = self.norm_L.shape, (self.cos_TE, self.sin_TE)
        plain_dim = self.key_NPL.shape[1]
        return Tokens(
            self.q_TNH[..., :plain_dim],
            apply_rope(self.q_TNH[..., plain_dim:], angles),
            rms_norm(self.vector_TC[:, :latent_dim], self.norm_L, eps=self.eps),
            apply_rope(self.vector_TC[:, latent_dim:], angles),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """Factors of the scores of tokens, normed and rotated: a query's score of a token is the sum over X heads of weight *
    relu(q . key)."""

    q_TXI: Array
    key_TI: Array
    weight_TX: Array
    """Float32."""


class AttendToLatents(Protocol):
    """As `Attend`, for a layer of latent attention."""

    def __call__(
        self,
        layer: int,
        projection: LatentProjection,
        /,
        *,
        scale: float,
        top_k: int | None = None,
        token_scores: TokenScores | None = None,
    ) -> Array:
        """Outputs [T, N, V], of the heads' values. top_k: most tokens that a query sees; those with the highest scores, or without
        scores those that the latest layer before chose by its own. None: it sees all before it."""
        ...
