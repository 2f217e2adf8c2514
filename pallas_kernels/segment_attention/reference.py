"""Segment attention by its definition: all scores of a head at once, those between segments masked."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def segment_attention(
    q_PHd: jax.Array, k_PHd: jax.Array, v_PHd: jax.Array, segment_P: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    is_real_P = segment_P >= 0
    sees_PP = (segment_P[:, None] == segment_P[None, :]) & is_real_P[None, :]

    def one_head(qkv: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_Pd, k_Pd, v_Pd = (jnp.where(is_real_P[:, None], x, 0).astype(jnp.float32) for x in qkv)
        scores_PP = jnp.matmul(q_Pd, k_Pd.T, precision=lax.Precision.HIGHEST) * scale
        weights_PP = jnp.where(sees_PP, jax.nn.softmax(scores_PP, axis=1, where=sees_PP), 0)
        return jnp.matmul(weights_PP, v_Pd, precision=lax.Precision.HIGHEST)

    out_HPd = lax.map(one_head, tuple(x.swapaxes(0, 1) for x in (q_PHd, k_PHd, v_PHd)))
    return jnp.where(is_real_P[:, None, None], out_HPd.swapaxes(0, 1), 0).astype(q_PHd.dtype)


def supports(*, platform: str, dtype: DTypeLike, head_dim: int, interpret: bool = False) -> bool:
    return True
