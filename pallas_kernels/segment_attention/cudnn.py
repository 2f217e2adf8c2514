"""Segment attention by cuDNN's flash attention over packed sequences, for Hopper GPUs and later.

JAX's entry to it is private: where it is missing or has another form, this implementation is not there. It takes a number of
segments that is fixed when a program is compiled, and starts thread blocks for as many; more segments than that are left to XLA.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.segment_attention import xla

PATCHES_OF_SEGMENT = 64
MAX_SEGMENTS = 64
"""cuDNN computes up to a segment for each PATCHES_OF_SEGMENT patches, and no more than this."""
LEAST_VERSION = 90600
"""Of cuDNN: 9.6, the first with packed sequences of several segments."""
_PARAMETERS = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale"}


def segment_attention(
    q_PHd: jax.Array,
    k_PHd: jax.Array,
    v_PHd: jax.Array,
    segment_P: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
    max_segments: int | None = None,
) -> jax.Array:
    """max_segments: that cuDNN computes, at least 2; None: by the number of patches."""
    num_patches = len(segment_P)
    max_segments = max_segments or max(2, min(num_patches // PATCHES_OF_SEGMENT, MAX_SEGMENTS))
    length_M, start_M1, num_segments = lengths_and_starts(segment_P, max_segments)
    is_real_P11 = (segment_P >= 0)[:, None, None]
    v_PHd = jnp.where(is_real_P11, v_PHd, 0)  # a tile of values may reach into the padding, and 0 times NaN is NaN

    def by_cudnn(q_PHd: jax.Array, k_PHd: jax.Array, v_PHd: jax.Array) -> jax.Array:
        fused = _entry()
        out_1PHd = fused.dot_product_attention(
            q_PHd[None],
            k_PHd[None],
            v_PHd[None],
            q_seqlen=length_M[None],
            kv_seqlen=length_M[None],
            q_offsets=start_M1[None],
            kv_offsets=start_M1[None],
            scale=scale,
        )
        return out_1PHd[0]

    def by_xla(q_PHd: jax.Array, k_PHd: jax.Array, v_PHd: jax.Array) -> jax.Array:
        return xla.segment_attention(q_PHd, k_PHd, v_PHd, segment_P, scale=scale)

    if num_patches <= max_segments:
        out_PHd = by_cudnn(q_PHd, k_PHd, v_PHd)
    else:
        out_PHd = lax.cond(num_segments <= max_segments, by_cudnn, by_xla, q_PHd, k_PHd, v_PHd)
    return jnp.where(is_real_P11, out_PHd, 0)


def lengths_and_starts(segment_P: jax.Array, max_segments: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As JAX's entry takes them: lengths int32 [M] and first patches int32 [M + 1] of the segments, -1 behind the last; and how many
    segments there are, of which those beyond M are left out.
    """
    num_patches = len(segment_P)
    before_P = jnp.concatenate([jnp.full(1, -1, segment_P.dtype), segment_P[:-1]])
    is_first_P = (segment_P >= 0) & (segment_P != before_P)
    num_segments = is_first_P.sum(dtype=jnp.int32)
    (start_M1,) = jnp.nonzero(is_first_P, size=max_segments + 1, fill_value=num_patches)
    num_real = (segment_P >= 0).sum(dtype=jnp.int32)
    end_M1 = jnp.minimum(start_M1.astype(jnp.int32), num_real)
    is_used_M = jnp.arange(max_segments) < num_segments
    length_M = jnp.where(is_used_M, end_M1[1:] - end_M1[:-1], -1)
    start_M1 = jnp.where(jnp.append(is_used_M, False), start_M1, -1).astype(jnp.int32)
    return length_M, start_M1, num_segments


def supports(*, platform: str, dtype: DTypeLike, head_dim: int, interpret: bool = False) -> bool:
    """Nothing but with a GPU in this process: JAX's entry asks it what it can do while a program is lowered."""
    if platform != "gpu" or interpret or not _is_there():
        return False
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and 16 <= head_dim <= 256


@functools.cache
def _is_there() -> bool:
    """Whether JAX has the entry in the form that is used here, with a cuDNN that is new enough, and the GPU is a Hopper or later."""
    try:
        fused = _entry()
        is_known = set(inspect.signature(fused.dot_product_attention).parameters) >= _PARAMETERS
        return is_known and fused.check_cudnn_version() >= LEAST_VERSION and fused.check_compute_capability("9.0")
    except (ImportError, AttributeError, RuntimeError):
        return False


def _entry() -> Any:
    """The module of JAX's private entry."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
