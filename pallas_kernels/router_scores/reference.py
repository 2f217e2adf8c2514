"""A router behind a norm, in plain JAX."""

import jax
import jax.numpy as jnp
from jax.lax import Precision


def supports(*, platform: str, width: int, interpret: bool = False) -> bool:
    return True


def router_scores(
    x_TD: jax.Array,
    norm_weight_D: jax.Array,
    router_ED: jax.Array,
    is_real_T: jax.Array | None,
    bias_E: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
    interpret: bool = False,
) -> jax.Array:
    """See the package."""
    wide_TD = x_TD.astype(jnp.float32)
    wide_TD = wide_TD * jax.lax.rsqrt(jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True) + eps)
    normed_TD = (wide_TD * (norm_weight_D.astype(jnp.float32) + weight_offset)).astype(x_TD.dtype)
    scores_TE = jnp.einsum("td,ed->te", normed_TD, router_ED, precision=Precision.HIGHEST, preferred_element_type=jnp.float32)
    return scores_TE if bias_E is None else scores_TE + bias_E
