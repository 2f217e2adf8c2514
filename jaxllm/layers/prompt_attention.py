"""Attention in both directions within each prompt of a step: no keys and values are kept."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.attend import Projection
from jaxllm.layers.linear import precision_of
from jaxllm.layers.vision import attend_in_segments

SMALLEST_TILE = 64
"""Fewest tokens of a tile of `attend_in_windows`."""
_MASKED = -1e30  # a finite score: padding sees nothing


def attend_in_prompts(
    projection: Projection, segment_T: Array, *, scale: float, window: int | None, implementation: str, interpret: bool
) -> Array:
    """Outputs [T, K, G, H]. segment_T: int32, the prompt of each token, ascending; -1 for padding. implementation: of
    `pallas_kernels.segment_attention`, for layers without a window."""
    q_TKGH, k_TKH, v_TKH = projection.finished()
    num_tokens, _, group_size, width = q_TKGH.shape
    q_TNH = q_TKGH.reshape(num_tokens, -1, width)
    k_TNH, v_TNH = (jnp.repeat(x_TKH, group_size, axis=1) for x_TKH in (k_TKH, v_TKH))
    if window is None or window >= num_tokens:
        out_TNH = attend_in_segments(
            q_TNH, k_TNH, v_TNH, segment_T, scale=scale, implementation=implementation, interpret=interpret
        )
    else:
        out_TNH = attend_in_windows(q_TNH, k_TNH, v_TNH, segment_T, scale=scale, reach=window - 1)
    return out_TNH.reshape(q_TKGH.shape)


@partial(jax.jit, static_argnames=("scale", "reach"))
def attend_in_windows(q_TNH: Array, k_TNH: Array, v_TNH: Array, segment_T: Array, *, scale: float, reach: int) -> Array:
    """Outputs [T, N, H] of tokens that see those of their prompt at most `reach` away, in plain JAX: tiles of queries see the keys of
    their own tile, of the one before and of the one behind."""
    num_tokens, num_heads, width = q_TNH.shape
    size = max(reach, SMALLEST_TILE)
    num_tiles = -(-num_tokens // size)
    options = {"precision": precision_of(q_TNH.dtype), "preferred_element_type": jnp.float32}

    def padded(x_TX: Array, before: int, value: int = 0) -> Array:
        behind = (num_tiles + before) * size - num_tokens
        widths = ((before * size, behind), *((0, 0),) * (x_TX.ndim - 1))
        return jnp.pad(x_TX, widths, constant_values=value)

    def near(x_TX: Array, value: int = 0) -> Array:
        """[tiles, 3 size, …]: a tile with its neighbours."""
        tiles = padded(x_TX, 1, value).reshape(num_tiles + 2, size, *x_TX.shape[1:])
        return jnp.concatenate([tiles[:-2], tiles[1:-1], tiles[2:]], axis=1)

    q_CMNH = padded(q_TNH, 0).reshape(num_tiles, size, num_heads, width)
    own_CM = padded(segment_T, 0, -1).reshape(num_tiles, size)
    offset_MS = jnp.arange(3 * size)[None, :] - size - jnp.arange(size)[:, None]
    is_seen_CMS = (own_CM[:, :, None] == near(segment_T, -1)[:, None, :]) & (jnp.abs(offset_MS) <= reach)
    scores_CNMS = scale * jnp.einsum("cmnh,csnh->cnms", q_CMNH, near(k_TNH), **options)  # type: ignore[arg-type]
    weights_CNMS = jax.nn.softmax(jnp.where(is_seen_CMS[:, None], scores_CNMS, _MASKED), axis=-1)
    out_CMNH = jnp.einsum("cnms,csnh->cmnh", weights_CNMS.astype(v_TNH.dtype), near(v_TNH), **options)  # type: ignore[arg-type]
    return out_CMNH.reshape(-1, num_heads, width)[:num_tokens].astype(q_TNH.dtype)
