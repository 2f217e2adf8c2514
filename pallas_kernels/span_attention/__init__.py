"""Attention to the later tokens of a span: the part of attention in both directions that causal attention leaves out.

Tokens of a span, as those of an image in Gemma 3, see each other in both directions. A query's keys are then those that causal attention
gives it, and the later ones of its span. These are all among the tokens of the same step: no cache is read. `paged_attention` gives
the first part of the result if asked for a part of the keys, this op the second; `paged_attention.parts.combine` makes both one.

Shapes:
    q_TKGH          queries of the step, as of `paged_attention`
    k_TKH, v_TKH    its keys and values
    later.num_T     int32[T]: how many of the tokens behind each one it sees; they are of the same row

Products accumulate in float32, float32 operands are multiplied in full precision, the softmax is float32.
"""

from dataclasses import dataclass, field

import jax

from pallas_kernels.span_attention import xla


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Later:
    """The later tokens that each token sees."""

    num_T: jax.Array
    """int32; 0 for tokens outside of spans, and for padding."""
    most: int = field(metadata={"static": True})
    """No number is larger."""


def span_attention(
    q_TKGH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    later: Later,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each token to the later ones that it sees -> (out_TKGH, lse_TKG), as of `paged_attention` over a part of the keys.

    Where a token sees none, out is zeros and lse is `parts.NO_KEYS`. A key that is not finite reaches only the tokens that see it; values
    that are not finite count as zero.
    """
    return xla.span_attention(q_TKGH, k_TKH, v_TKH, later.num_T, later.most, scale=scale, soft_cap=soft_cap)
